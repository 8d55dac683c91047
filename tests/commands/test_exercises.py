"""The exercises as a participant runs them: the solutions pass the check, which lists the open gaps of exercises."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from helpers import LAUNCHERS, REPOSITORY, Finished, program
from workbench import Bench

SOLUTION = "exercises/solution/data_parallel.py"
SHARD = "exercises/solution/shard.py"
PIPELINE = "exercises/solution/pipeline.py"
RING = "exercises/solution/ring.py"


@pytest.fixture(scope="module")
def python(server, tmp_path_factory) -> Callable[..., Finished]:
    """``python(script, *words, processes=0)`` runs a script of the repository, or ranks of it.

    The processes fork from the tests' server, which has imported PyTorch.
    """
    bench = Bench(server, tmp_path_factory.mktemp("exercises") / "work", {}, limit=300)

    def run(script: str, *words: object, processes: int = 0) -> Finished:
        return bench.start(*words, script=script, ranks=processes, cwd=REPOSITORY).wait()

    return run


def command(*words: object, processes: int = 0) -> subprocess.CompletedProcess:
    """Run Python with these words, with torchrun if `processes` is given."""
    words = [*LAUNCHERS["torchrun" if processes else "python"](processes), *map(str, words)]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)


# Of each solution: the number of its gaps, the check of all gaps together, the page that follows, and the next command
FINISHED = [
    (SOLUTION, 6, "", (), "docs/by-hand.md", f"--nproc_per_node=2 {SOLUTION} --zero1"),
    (SHARD, 4, "losses and bytes", (2, 4), "docs/ddp.md", f"--nproc_per_node=2 {SHARD}"),
    (PIPELINE, 6, "losses and gradients", (2, 3, 4), "docs/pipeline.md",
     f"--nproc_per_node=4 {PIPELINE} --schedule 1f1b"),
    (RING, 4, "output, gradients and bytes", (1, 2, 3, 4), "docs/long-texts.md", f"--nproc_per_node=4 {RING}"),
]  # fmt: skip


@pytest.mark.promise("exercises have gaps and a correct solution")
@pytest.mark.parametrize(("solution", "gaps", "together", "worlds", "page", "following"), FINISHED)
def test_a_finished_exercise_is_right(python, solution, gaps, together, worlds, page, following):
    done = python("exercises/check.py", solution)
    expected = [f"gap {number}: right" for number in range(1, gaps + 1)]
    expected += [f"{together} on {ranks} ranks: right" for ranks in worlds]
    expected += [f"All is right. Next, run this command, then continue with {page}:"]
    expected += [f"    OMP_NUM_THREADS=1 torchrun {following}"]
    assert (done.code, done.out.splitlines()) == (0, expected), done


@pytest.mark.parametrize(("solution", "gaps"), [(SOLUTION, 6), (SHARD, 4), (PIPELINE, 6), (RING, 4)])
def test_the_gaps_of_a_new_exercise_are_open(python, tmp_path, solution, gaps):
    exercise = tmp_path / "exercise.py"
    exercise.write_text(program("exercises/make.py").cut_gaps((REPOSITORY / solution).read_text()))
    done = python("exercises/check.py", exercise)
    report = "".join(f"gap {number}: open\n" for number in range(1, gaps + 1))
    assert (done.code, done.out) == (1, report), done


def test_exercises_are_made_from_their_solutions_and_your_own_code_stays(tmp_path):
    """Without git, and in a clone: the command overwrites only what is committed."""
    shutil.copytree(REPOSITORY / "exercises/solution", tmp_path / "solution")
    make = shutil.copy(REPOSITORY / "exercises/make.py", tmp_path)
    shard = tmp_path / "shard.py"
    assert command(make).returncode == 0
    made = shard.read_text()
    assert made.count("NotImplementedError") == 4
    shard.write_text("solved")
    done = command(make)
    why = "git has no committed file to compare with; run this command in a git clone, or remove the file first"
    assert (done.returncode, done.stderr) == (2, f"error: exercises/shard.py: {why}\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", tmp_path]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    assert (command(make).returncode, shard.read_text()) == (0, made), "git has this file, so it may be overwritten"
    shard.write_text("solved again")
    done = command(make)
    why = "differs from the committed file; commit your changes, or undo them with git restore"
    assert (done.returncode, done.stderr) == (2, f"error: exercises/shard.py: {why}\n")
    assert shard.read_text() == "solved again"


@pytest.mark.parametrize(
    ("solution", "right", "gap", "line"),
    [
        (SOLUTION, "length = len(flat) // world\n    return flat[rank * length : (rank + 1) * length]", 5,
         "gap 6: open (gap 5)"),
        (RING, "return (rank - turn) % world", 2, "gap 2: open: owner_of_block()"),
    ],
)  # fmt: skip
def test_check_names_the_open_gap_that_is_needed_and_an_open_function(python, tmp_path, solution, right, gap, line):
    text = (REPOSITORY / solution).read_text()
    assert text.count(right) == 1
    (tmp_path / "mine.py").write_text(text.replace(right, f'raise NotImplementedError("gap {gap}")'))
    done = python("exercises/check.py", tmp_path / "mine.py")
    assert done.code == 1 and line in done.out.splitlines(), done


# Each case: a correct text of the solution of data_parallel.py, a wrong replacement, the gap, and the check's message
WRONG_DATA_PARALLEL = {
    "sum of the gradients": (
        "        parameter.grad /= world\n", "", "gap 4",
        r"the mean of the gradients 1 and 3 is 2, but the gradient of weight is 4"),
    "all rows on each rank": (
        "return batch[rank::world]", "return batch", "gap 2",
        r"the shapes of the ranks' parts are \[\(6, 2\), \(6, 2\)\] instead of \[\(3, 2\), \(3, 2\)\]"),
    "unequal beginning": (
        "dist.broadcast(parameter.data, src=0)", "pass", "gap 3", "weight differs from weight on rank 0"),
}  # fmt: skip
# Each case: a correct text of the solution of shard.py, a wrong replacement, the check that finds it, and its message
REDUCE_SCATTER = "        dist.reduce_scatter_single(self.part.grad, self.whole.grad)\n"
GATHER_AGAIN = """        allocate(self.whole)
        dist.all_gather_single(self.whole.data, self.part.data)

    def after_backward"""
LINEAR = """        flat, numbers = {}, self.rows * self.columns
        weight, bias = flat[:numbers].view(self.rows, self.columns), flat[numbers:][: self.rows]
        outputs = nn.functional.linear(inputs, weight, bias)
"""
NO_AUTOGRAD = (
    "autograd does not know how the outputs were computed, .*; leave out .detach\\(\\) and torch.no_grad\\(\\)"
)
COPIED = "the outputs were computed with a copy of self.whole or with its .data, .*; compute them with self.compute.*"
NUMBERS = r"\[\d+.0, \d+.0, \d+.0\]"
WRONG_SHARD = {
    "forgot to free": (
        "        free(self.whole)\n        return outputs\n", "        return outputs\n", "gap 2",
        r"after forward\(\) the rank still holds the whole layer, 24 bytes; "
        "free self.whole when the outputs are computed"),
    "detached outputs": (
        "        outputs = self.compute(inputs)\n", "        outputs = self.compute(inputs).detach()\n", "gap 2",
        NO_AUTOGRAD),
    "outputs without gradients": (
        "        outputs = self.compute(inputs)\n",
        "        with torch.no_grad():\n            outputs = self.compute(inputs)\n", "gap 2", NO_AUTOGRAD),
    "computed with the data": (
        "        outputs = self.compute(inputs)\n", LINEAR.format("self.whole.data"), "gap 2", COPIED),
    "computed with a copy": (
        "        outputs = self.compute(inputs)\n", LINEAR.format("self.whole.clone()"), "gap 2", COPIED),
    "freed the part": (
        "        free(self.whole)\n        return outputs\n", "        free(self.part)\n        return outputs\n",
        "gap 2",
        "self.part is freed, and no other rank has this part of the weights; free the gathered layer, self.whole"),
    "divided twice": (
        REDUCE_SCATTER, "        self.whole.grad /= self.world\n" + REDUCE_SCATTER, "gap 4",
        rf"the gradient of the part is {NUMBERS} instead of {NUMBERS}: "
        "this is the sum divided by self.world twice; divide it only once"),
    "gathered in the forward pass only": (
        GATHER_AGAIN, GATHER_AGAIN.replace("        dist.all_gather_single(self.whole.data, self.part.data)\n", "")
        .replace("allocate(self.whole)", "pass"), "gap 3",
        "self.whole has no memory when the backward pass of the layer begins; forward\\(\\) has freed it, so gather it "
        "again .*, and do not free it here"),
    "all-reduce": (
        REDUCE_SCATTER, "        dist.all_reduce(self.whole.grad)\n"
        "        self.part.grad = shard(self.whole.grad, dist.get_rank(), self.world)\n", "gap 4",
        "the gradient is right, but an all-reduce sends twice as much as needed, because each rank gets the gradient "
        "of the whole layer; use dist.reduce_scatter_single, which gives each rank only its part"),
    "no padding": (
        "    flat = nn.functional.pad(flat, (0, -len(flat) % world))\n", "", "gap 1",
        r"5 numbers on 2 ranks give parts of \[2, 2\] numbers instead of \[3, 3\]; "
        "before you cut the flat tensor, append zeros, as few as make all parts equally long"),
    "another order of collectives on two ranks": (
        GATHER_AGAIN, GATHER_AGAIN.replace("        dist.all_gather_single(self.whole.data, self.part.data)\n", """
        rank = dist.get_rank()
        parts = list(self.whole.data.chunk(self.world))
        parts[rank].copy_(self.part.data)
        for owner in (rank, 1 - rank):
            dist.broadcast(parts[owner], owner)
"""), "gap 3",
        "at the same time rank 0 calls broadcast with root 0 for 3 numbers, rank 1 calls broadcast with root 1 for 3 "
        "numbers; all ranks must call the same collectives in the same order"),
    "kept the gathered gradient": (
        "        self.whole.grad = None\n", "", "gap 4",
        "self.whole.grad still holds the gradient of the whole layer, 24 bytes, and the next step would add to it; "
        "set it to None when the part has its gradient"),
    "optimizer on the gathered tensor": (
        "        self.part.grad = torch.empty_like(self.part)\n" + REDUCE_SCATTER
        + "        self.part.grad /= self.world\n",
        "        dist.all_reduce(self.whole.grad)\n        torch.optim.Adam([self.whole], lr=0.01).step()\n", "gap 4",
        "self.part has no gradient, so Adam does not update it. Adam must step on the part, because the whole layer is "
        "freed; store the part's mean gradient in self.part.grad"),
    "optimizer also on the gathered tensor": (
        "self.whole = torch.empty(len(self.part) * world, requires_grad=True)",
        "self.whole = nn.Parameter(torch.empty(len(self.part) * world))", "losses and bytes on 2 ranks",
        r"model.parameters\(\) are not the parts of the layers; only self.part may be an nn.Parameter, "
        "because Adam updates every nn.Parameter"),
    "sum instead of mean": (
        "        self.part.grad /= self.world\n", "", "gap 4",
        rf"the gradient of the part is {NUMBERS} instead of {NUMBERS}: "
        "this is the sum over the ranks; divide it by self.world"),
}  # fmt: skip
# Each case: a correct text of the solution of pipeline.py, a wrong replacement, the gap, and the check's message
WRONG_PIPELINE = {
    "hang because of send": (
        "self.sent.append(dist.isend(tensor, other))", "self.sent.append(dist.send(tensor, other))", "gap 6",
        "hangs: rank 0 still waits after 2 seconds; .*"),
    "unequal stages": (
        "0 if rank == 0 else 1 + rank * blocks", "rank * blocks", "gap 1",
        r"the 2 stages have \[6, 7\] blocks instead of \[6, 6\]"),
    "inputs without a gradient": (
        ".requires_grad_()", "", "gap 2", r"the inputs will have no gradient; call requires_grad_\(\) on them"),
    "sum of the losses": (
        "compute_loss(outputs, batch[micro]) / len(batch)", "compute_loss(outputs, batch[micro])", "gap 2",
        r"the loss is \d\.\d+ instead of \d\.\d+; divide the loss by the number of micro batches, 2"),
    "gradient of a sum": (
        "            outputs.backward(gradient)", "            outputs.sum().backward()", "gap 3",
        r"the gradient of \S+ differs from the gradient in one process"),
    "waiting is measured": (
        "gradient = None if self.is_last else self.receive(self.rank + 1)\n"
        '        with self.measured("backward", micro):\n',
        'with self.measured("backward", micro):\n'
        "            gradient = None if self.is_last else self.receive(self.rank + 1)\n", "gap 3",
        r"receive\(\) runs inside `measured`, so its waiting time counts as backward time"),
    "nothing is measured": (
        '        with self.measured("backward", micro):\n            outputs.backward(gradient)\n',
        '        outputs.backward(gradient)\n        with self.measured("backward", micro):\n            pass\n',
        "gap 3",
        r'the backward pass runs outside `measured\("backward", micro\)`, so its time does not count'),
    "backward passes in descending order": (
        "return forward + backward", "return forward + backward[::-1]", "gap 4",
        r"order for rank \d of 2 with 5 micro batches: entry 6 of the order is \('backward', 4\) "
        r"instead of \('backward', 0\)"),
    "too many micro batches are kept": (
        "ahead = min(micro_batches, world - rank)", "ahead = min(micro_batches, world)", "gap 5",
        r"order for rank 1 of 2 with 3 micro batches: entry 2 of the order is \('forward', 1\) "
        r"instead of \('backward', 0\)"),
}  # fmt: skip
# Each case: a correct text of the solution of ring.py, a wrong replacement, the gap's number, and the check's message
SCALED = """    total = first.total * scales[0] + second.total * scales[1]
    output = first.output * scales[0] + second.output * scales[1]
"""
EARLIER = "Pair(own, other, own == other) for own in own_pieces for other in other_pieces if other <= own"
LAST_TURN = "    of_keys, of_values = ring.pass_on(block[2:])\n"
WRONG_RING = {
    "merge without rescaling": (
        SCALED, SCALED.replace(" * scales[0]", "").replace(" * scales[1]", ""), "gap 1",
        r"merge\(\) adds total and output without rescaling, .* multiply total and output of each part by exp\(its .*"),
    "merge without rescaling the second part": (
        SCALED, SCALED.replace(" * scales[1]", ""), "gap 1",
        r"the softmax of both parts together is wrong; multiply total and output of each part by exp\(its .*"),
    "maximum of one part": (
        "torch.maximum(first.maximum, second.maximum)", "first.maximum", "gap 1",
        r"the new maximum is that of the first part only. .*; use torch.maximum\(\)"),
    "one maximum for all rows": (
        "torch.maximum(first.maximum, second.maximum)",
        "torch.maximum(first.maximum, second.maximum).max().expand_as(first.maximum)", "gap 1",
        r"all rows get the same maximum; each row needs its own, .*"),
    "exp without a maximum": (
        "    scales = [(part.maximum - maximum).exp() for",
        "    maximum = torch.zeros_like(maximum)\n    scales = [part.maximum.exp() for", "gap 1",
        r"merge\(\) is right for small scores, but exp\(1000\) is infinite; .*, which is at most 1"),
    "log-sum-exp without the maximum": (
        "partial.maximum + partial.total.log()", "partial.total.log()", "gap 1",
        r"log_sum_exp\(\) is without the maximum: .*"),
    "log-sum-exp of large numbers": (
        "partial.maximum + partial.total.log()", "(partial.maximum.exp() * partial.total).log()", "gap 1",
        r"log_sum_exp\(\) is right for small scores, but exp\(\) of a score of 1,000 is infinite; .*"),
    "log-sum-exp of one key more": (
        "partial.total.log()", "partial.total.log1p()", "gap 1",
        r"log_sum_exp\(\) returns tensor\(.*\) instead of tensor\(.*\)"),
    "log-sum-exp of another shape": (
        "partial.maximum + partial.total.log()", "(partial.maximum + partial.total.log()).squeeze(-1)", "gap 1",
        r"the result of log_sum_exp\(\) has the shape \(5,\) instead of \(5, 1\)"),
    "blocks from the wrong side": (
        "(rank - turn) % world", "(rank + turn) % world", "gap 2",
        r"owner_of_block\(turn=1, rank=\d, world=3\) returns \d instead of \d; .*: subtract the turns"),
    "own block not cut": (
        EARLIER, EARLIER.replace("own == other", "False"), "gap 2",
        r"own pieces .*: Pair\(0, 0\) is not cut, so a query would see later tokens of its own piece"),
    "own block skipped": (
        EARLIER, EARLIER.replace("other <= own", "other < own"), "gap 2",
        r"own pieces .*: Pair\(0, 0\) is missing, but piece 0 sees itself; compare each own piece with .*"),
    "own and other block swapped": (
        EARLIER, EARLIER.replace("if other <= own", "if own <= other"), "gap 2",
        r"own pieces .*: Pair\(1, 0\) is missing, but piece 1 sees piece 0; compare each own piece with .*"),
    "later blocks are seen": (
        EARLIER, EARLIER.replace(" if other <= own", ""), "gap 2",
        "own pieces .*: piece 1 is later than piece 0, so its queries would see later tokens; skip this pair"),
    "later blocks are hidden but computed": (
        EARLIER, EARLIER.replace(" if other <= own", "").replace("own == other", "own <= other"), "gap 2",
        "own pieces .* so the result is right, but the work is wasted; skip this pair"),
    "hang because all ranks send first": (
        "    message = dist.isend(block, following)\n", "    message = dist.Work()\n    dist.send(block, following)\n",
        "gap 2", r"hangs: .*; in exchange\(\): isend\(\) first, then recv\(\), then wait\(\) of the object .*"),
    "message not waited for": (
        "    message.wait()\n", "", "gap 2",
        r"exchange\(\) does not wait for the block that it sends, .* call wait\(\) of the object that .*"),
    "transpose of all dimensions": (
        "weights.mT @ gradient\n", "weights.T @ gradient\n", "gap 3", r"RuntimeError in line \d+: .*"),
    "softmax of one block": (
        "(scores - lse).exp()", "scores.softmax(-1)", "gap 3",
        r"the weights are the softmax of this block only, .*; use exp\(scores - lse\)"),
    "scores scaled twice": (
        "(scores - lse).exp()", "(scores / keys.shape[-1] ** 0.5 - lse).exp()", "gap 3",
        "the scores are divided by the root of the head size, but they already are; .*"),
    "gradients scaled twice": (
        "root = keys.shape[-1] ** 0.5", "root = keys.shape[-1]", "gap 3",
        "the gradient of the queries is divided by the root of the head size twice"),
    "no delta": (
        "(gradient @ values.mT - delta)", "(gradient @ values.mT)", "gap 3",
        "in the gradient of the scores delta is missing"),
    "one turn too few": (
        LAST_TURN, LAST_TURN.replace("ring.pass_on(block[2:])", "block[2:]"), "gap 4",
        r"the gradient of the keys is that of rank \d: one turn is missing. .*"),
    "bytes not counted": (
        LAST_TURN, LAST_TURN.replace("ring.pass_on(", "exchange(")
        .replace("])", "].contiguous(), (ring.rank + 1) % ring.world, (ring.rank - 1) % ring.world)"), "gap 4",
        r"the gradients are right, but only \d+ bytes instead of \d+ are counted; use ring.pass_on\(\), .*"),
    "gradients stay": (
        "            block = ring.pass_on(block)\n" + LAST_TURN,
        "            block = torch.cat((ring.pass_on(block[:2]), block[2:]))\n    of_keys, of_values = block[2:]\n",
        "gap 4", "the gradient of the keys lacks what other ranks have computed: .* must travel with .*"),
    "keys travel for nothing": (
        LAST_TURN, LAST_TURN.replace("ring.pass_on(block[2:])", "ring.pass_on(block)[2:]"), "gap 4",
        "the gradients are right, but .* after the last turn nobody reads the keys and values, .*"),
}  # fmt: skip
# Run one check for each file, with one start of Python. A solution that hangs need not hang for long
RUN_CHECKS = """
import sys
from pathlib import Path
sys.path.insert(0, "exercises")
import check
table = getattr(check, sys.argv[1])
checks = {f"gap {number}": each for number, each in enumerate(table.items(), start=1)}
checks["losses and bytes on 2 ranks"] = check.check_sharded_training, check.WORLD
for line, file in zip(sys.argv[2::2], sys.argv[3::2]):
    check.TIMEOUT = 2 if "hang because" in file else 20
    function, world = checks[line]
    print(*check.run_check(function, check.load(Path(file)), world).split())  # a tensor may have several lines
"""


@pytest.mark.parametrize(
    ("solution", "table", "cases"),
    [
        (SOLUTION, "DATA_PARALLEL", WRONG_DATA_PARALLEL),
        (SHARD, "SHARD", WRONG_SHARD),
        (PIPELINE, "PIPELINE", WRONG_PIPELINE),
        (RING, "RING", WRONG_RING),
    ],
)
def test_check_names_each_typical_mistake(tmp_path, solution, table, cases):
    text = (REPOSITORY / solution).read_text()
    words = [table]
    for name, (right, wrong, line, _) in cases.items():
        assert text.count(right) == 1, name
        (tmp_path / f"{name}.py").write_text(text.replace(right, wrong))
        words += [line, tmp_path / f"{name}.py"]
    done = command("-c", RUN_CHECKS, *words)
    found = dict(zip(cases, done.stdout.splitlines(), strict=True))
    for name, (_, _, _, message) in cases.items():
        assert re.fullmatch(rf"(wrong: rank \d: )?{message}", found[name]), found[name]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring_counts_what_the_formulas_say(python, ranks):
    done = python(RING, "--tokens", 50, processes=ranks)
    counted = re.findall(r"^\S.*? ([\d,]+)   formula +([\d,]+) = ", done.out, re.MULTILINE)
    assert len(counted) == (4 if ranks == 1 else 8) and all(each == formula for each, formula in counted), done
    shares = re.findall(r": +((?:[\d.]+% ?)+)", done.out)
    assert [share.split() for share in shares[::2]] == [share.split() for share in shares[1::2]] and len(shares) == 4
    differences = re.findall(r"one process: +(\S+)$", done.out, re.MULTILINE)
    assert len(differences) == 2 and all(float(each) < 1e-12 for each in differences), done


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gpt_with_ring_attention_learns_what_it_learns_in_one_process(python, ranks):
    done = python("tests/commands/ring_in_gpt.py", processes=ranks)
    found = re.findall(r"^loss (\S+) gradients (\S+) sent (\d+)$", done.out, re.MULTILINE)
    assert done.code == 0 and len(found) == 2 * ranks, done
    assert all(float(each) < 1e-5 for loss, gradients, _ in found for each in (loss, gradients)), done
    # fp32, two layers of hidden size 64: forward 2 (n - 1), backward 4 n - 2 tensors of 2048 / n tokens
    assert {int(sent) for *_, sent in found} == {4 * 2 * 64 * 2048 // ranks * (6 * ranks - 4)}


def losses(done: Finished) -> list[float]:
    assert done.code == 0, done
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.out, re.MULTILINE)]


def test_the_losses_do_not_depend_on_the_number_of_ranks(python):
    one_process = losses(python(SOLUTION))
    assert len(one_process) == 6 and one_process[-1] < one_process[0] / 2
    for flags in ([], ["--zero1"]):
        assert losses(python(SOLUTION, *flags, processes=2)) == pytest.approx(one_process, rel=1e-3)
    assert losses(python(SHARD)) == one_process
    for ranks, held, sent in ((2, 2576, 1932), (4, 1296, 2916)):
        done = python(SHARD, processes=ranks)
        assert losses(done) == pytest.approx(one_process, rel=1e-4)
        moments = ("before the forward pass", "after the forward pass", "after the backward pass", "sum")
        counted = re.findall(rf"^({'|'.join(moments)}) .* (\d+)$", done.out, re.MULTILINE)
        assert counted == [*((moment, str(held)) for moment in moments[:3]), ("sum", str(sent))], done


@pytest.fixture(scope="module")
def one_process(python) -> list[float]:
    """Return the losses of the full model in one process."""
    return losses(python(PIPELINE, "--micro_batches", 5))


@pytest.mark.parametrize(
    ("ranks", "schedule", "orders", "formula"),
    [
        (2, "one_at_a_time", ["aAbBcCdDeE"] * 2, "1 / 2 = 50.0%"),
        (3, "gpipe", ["abcdeABCDE"] * 3, "2 / 7 = 28.6%"),
        (4, "1f1b", ["abcdAeBCDE", "abcAdBeCDE", "abAcBdCeDE", "aAbBcCdDeE"], "3 / 8 = 37.5%"),
    ],
)
def test_a_pipeline_follows_its_schedule_and_matches_one_process(
    python, one_process, tmp_path, ranks, schedule, orders, formula
):
    flags = ["--micro_batches", 5, "--schedule", schedule]
    done = python(PIPELINE, *flags, "--picture", tmp_path / "timeline.png", processes=ranks)
    assert losses(done) == one_process and len(one_process) == 3
    lines = re.findall(r"^rank (\d) \|([a-eA-E.]+)  kept at most (\d)$", done.out, re.MULTILINE)
    assert [int(rank) for rank, _, _ in lines] == list(range(ranks))
    assert [re.sub(r"(.)\1*", r"\1", line.replace(".", "")) for _, line, _ in lines] == orders
    kept = {"one_at_a_time": [1] * ranks, "gpipe": [5] * ranks, "1f1b": [4, 3, 2, 1]}[schedule]
    assert [int(most) for _, _, most in lines] == kept
    waits = re.search(r"of which a rank waits (\S+)% in the mean;\n\(p - 1\) / \(m \+ p - 1\) = (.*)\n", done.out)
    assert waits[2] == formula
    assert float(waits[1]) >= float(formula[-5:-1]) - 0.1, "a rank cannot wait less than the schedule requires"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "gpipe"), (4, "1f1b")])
def test_the_library_pipeline_gives_the_same_losses(python, one_process, ranks, schedule):
    done = python(PIPELINE, "--micro_batches", 5, "--schedule", schedule, "--library", processes=ranks)
    assert losses(done) == one_process


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (0, ["--library"], "start with torchrun --nproc_per_node=4"),
        (0, ["--micro_batches", 0], "--micro_batches: 0 is too few; give 1 or more"),
        (2, ["--library", "--schedule", "1f1b", "--micro_batches", 1], "the 2 stages; give 2 or more, or leave out"),
    ],
)
def test_unsupported_pipeline_settings_give_one_error_line(python, ranks, flags, message):
    done = python(PIPELINE, *flags, processes=ranks)
    lines = [line for line in done.err.splitlines() if line.startswith("pipeline.py: error: ")]
    assert done.code != 0 and lines and all(message in line for line in lines), done
    assert "pipelining" not in done.err, done  # this word is in tracebacks of PyTorch's schedules


@pytest.mark.parametrize(
    "program",
    [
        path.relative_to(REPOSITORY)
        for path in sorted((REPOSITORY / "exercises").rglob("*.py"))
        if "torch.optim." in path.read_text()
    ],
    ids=str,
)
def test_a_program_with_an_optimizer_hides_gpus_before_it_imports_torch(tmp_path, program):
    (tmp_path / "torch.py").write_text('import os\nprint([os.environ["CUDA_VISIBLE_DEVICES"]])\nraise SystemExit\n')
    environment = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, program]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['']\n", done


def test_collectives_print_what_each_rank_holds():
    done = command("exercises/collectives.py", processes=2)
    assert done.returncode == 0, done
    shown = re.findall(r"^(\S[^:\n]*): .*\n  rank 0 .*-> +(.*)\n  rank 1 .*-> +(.*)$", done.stdout, re.MULTILINE)
    assert shown == [
        ("broadcast", "[0, 1]", "[0, 1]"),
        ("reduce", "[10, 12]", "undefined"),
        ("all-reduce", "[10, 12]", "[10, 12]"),
        ("reduce-scatter", "[10]", "[12]"),
        ("all-gather", "[0, 11]", "[0, 11]"),
        ("reduce-scatter, then all-gather", "[10, 12]", "[10, 12]"),
    ]
