"""The exercises, as a participant runs them: the finished files are right, and the files with gaps say what is open."""

import ast
import re
import subprocess

import pytest

from helpers import LAUNCHERS, REPOSITORY

EXERCISES = REPOSITORY / "exercises"
SOLUTION = "exercises/solution/data_parallel.py"


def python(*words: object, processes: int = 0, timeout: int = 300):
    """Run a script of the repository, by torchrun where it takes several processes."""
    launch = LAUNCHERS["torchrun" if processes else "python"](processes)
    command = [*launch, *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)


def test_the_finished_exercise_is_right():
    done = python("exercises/check.py", SOLUTION)
    assert (done.returncode, done.stdout) == (0, "".join(f"gap {number}: right\n" for number in range(1, 7))), done


def test_the_exercise_has_six_gaps_and_is_else_the_finished_one():
    done = python("exercises/check.py")
    assert done.returncode == 1, done
    opened = [5 if number == 6 else number for number in range(1, 7)]
    assert done.stdout.splitlines() == [f"gap {n}: open (gap {gap})" for n, gap in enumerate(opened, start=1)]
    with_gaps, finished = (
        ast.parse((REPOSITORY / path).read_text()) for path in ("exercises/data_parallel.py", SOLUTION)
    )
    for tree in (with_gaps, finished):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and "Gap " in (ast.get_docstring(function) or ""):
                del function.body[1:]
    assert ast.unparse(with_gaps) == ast.unparse(finished)


WRONG = {
    # what a participant may write, and what the check says of it
    "dist.all_reduce(parameter.grad)\n        parameter.grad /= world": (
        "dist.all_reduce(parameter.grad)",
        4,
        r"wrong: on rank \d the mean of 1 and 3 should be 2, and the gradient of weight has 4",
    ),
    "return batch[rank::world]": ("return batch", 2, r"wrong: on rank \d the shapes are \[\(6, 2\), \(6, 2\)\]"),
    "dist.broadcast(parameter.data, src=0)": (
        "dist.broadcast(parameter.data, src=dist.get_rank())",
        3,
        r"wrong: on rank 1 weight is not rank 0's|rank \d waits and never ends: .+",
    ),
}


@pytest.mark.parametrize("right", WRONG)
def test_a_wrong_gap_is_named_with_the_reason(tmp_path, right):
    wrong, gap, message = WRONG[right]
    text = (REPOSITORY / SOLUTION).read_text()
    assert text.count(right) == 1
    (tmp_path / "mine.py").write_text(text.replace(right, wrong))
    done = python("exercises/check.py", tmp_path / "mine.py")
    assert done.returncode == 1, done
    assert re.fullmatch(rf"gap {gap}: (?:{message})", done.stdout.splitlines()[gap - 1]), done


def losses(done) -> list[float]:
    assert done.returncode == 0, done
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]


def test_the_losses_do_not_depend_on_the_number_of_ranks():
    alone = losses(python(SOLUTION))
    assert len(alone) == 6 and alone[-1] < alone[0] / 2
    for flags in ([], ["--zero1"]):
        assert losses(python(SOLUTION, *flags, processes=2)) == pytest.approx(alone, rel=1e-3)


def test_collectives_print_what_each_rank_holds():
    done = python("exercises/collectives.py", processes=2)
    assert done.returncode == 0, done
    shown = re.findall(r"^(\S[^:\n]*): .*\n  rank 0 .*-> +(.*)\n  rank 1 .*-> +(.*)$", done.stdout, re.MULTILINE)
    assert shown == [
        ("broadcast", "[0, 1]", "[0, 1]"),
        ("reduce", "[10, 12]", "nothing of use"),
        ("all-reduce", "[10, 12]", "[10, 12]"),
        ("reduce-scatter", "[10]", "[12]"),
        ("all-gather", "[0, 11]", "[0, 11]"),
        ("reduce-scatter, then all-gather", "[10, 12]", "[10, 12]"),
    ]
