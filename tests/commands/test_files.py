"""Check that the pages' commands are valid bash, and that git tracks the right files.

test_dry_run.py runs the scripts of the experiments.
"""

import re
import subprocess

import pytest

from helpers import EXPERIMENT_SCRIPTS, PAGES, REPOSITORY, bash_blocks, program


def git(*arguments: object, **options: object) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, **options)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_correct_bash(page):
    for _, text in bash_blocks(page):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), text


def test_the_log_folders_are_tracked_and_their_content_is_not():
    folders = [path.parent / "log" for path in EXPERIMENT_SCRIPTS]
    tracked = git("ls-files", "-z", *(folder / ".gitignore" for folder in folders)).split("\0")
    assert {str((folder / ".gitignore").relative_to(REPOSITORY)) for folder in folders} == set(filter(None, tracked))
    logs = "\0".join(str(folder / "x_1.out") for folder in folders)
    assert git("check-ignore", "-z", "--stdin", input=logs).rstrip("\0") == logs


def test_git_checks_out_scripts_with_unix_line_ends():
    scripts = [EXPERIMENT_SCRIPTS[0], REPOSITORY / "experiments/job.sh", REPOSITORY / "experiments/sites/mine.sh"]
    assert git("check-attr", "eol", "--", *scripts).count(": eol: lf\n") == len(scripts)


@pytest.mark.parametrize("name", ["data_parallel", "shard", "pipeline", "ring"])
def test_a_committed_exercise_is_its_solution_with_gaps(name):
    """The working tree does not count: there, a participant solves the gaps."""
    exercise = program("exercises/make.py").cut_gaps(git("show", f"HEAD:exercises/solution/{name}.py"))
    assert exercise == git("show", f"HEAD:exercises/{name}.py"), "run python exercises/make.py and commit"


def test_no_tracked_file_holds_a_key():
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    named = re.compile(r"(WANDB_API_KEY|HF_TOKEN|api_key)['\"]?\s*[=:]\s*['\"]?\w{16,}|\bhf_[A-Za-z]{30,}\b")
    bare = re.compile(r"\b[0-9a-f]{40}\b")  # the form of a Weights & Biases key or a git commit
    texts = {".py", ".sh", ".slurm", ".md", ".json", ".yml", ".yaml", ".toml", ".txt"}
    for name in filter(None, listed.split("\0")):
        path = REPOSITORY / name
        if path.is_file() and path.suffix in texts:
            text = path.read_text(encoding="utf-8")
            assert not named.search(text), name
            assert not (name.startswith("experiments/") and bare.search(text)), name
