"""Tests of experiments/submit.sh with a stub for sbatch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import EXPERIMENT_SCRIPTS, REPOSITORY
from shell import program, shell_environment


@pytest.fixture
def submit(workshop, tmp_path):
    """Run submit.sh with a stub for sbatch that numbers the jobs and records folder, variables and arguments."""
    noted = tmp_path / "noted"
    text = f"""if [[ $PWD = *"${{REFUSED-nothing}}" ]]; then
  echo "sbatch: error: Requested node configuration is not available" >&2
  exit 1
fi
if [[ $1 = --test-only ]]; then
  exit
fi
printf '%s\\0' "$PWD" "${{SITE-}} ${{SBATCH_ACCOUNT-}} ${{SNAPSHOT-}} ${{MODEL_NAME-}}" "$*" >>'{noted}'
echo "$(($(tr -cd '\\0' <'{noted}' | wc -c) / 3));cluster"
"""
    program(tmp_path / "bin", "sbatch", text)
    program(tmp_path / "bin", "sinfo", "[[ -z ${NO_CLUSTER-} ]]")

    def run(*arguments: str, cwd: str = "", **variables: object):
        environment = shell_environment(**variables)
        environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
        command = [workshop / "experiments/submit.sh", *arguments]
        done = subprocess.run(
            command,
            cwd=workshop / cwd,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        words = noted.read_text().split("\0")[:-1] if noted.exists() else []
        return done, [tuple(words[i : i + 3]) for i in range(0, len(words), 3)]

    return run


STAGES = "deepspeed-single-gpu/cpu_offloading"


# A stub for python, with lines in place of estimate_memory.py. It writes no __pycache__
STUB = f'[[ $1 = */estimate_memory.py ]] || exec "{sys.executable}" -B "$@"\n{{}}'


@pytest.fixture
def shown(workshop):
    """Install a stub for the estimate of a dry run that prints its command. test_dry_run.py tests the real checks."""
    program(workshop / ".venv/bin", "python", STUB.format('echo "> $1"'))
    (workshop / ".venv/installed").touch()  # without this stamp, the site laptop does not use the environment


def test_the_dry_run_shows_the_exact_lines_and_each_job(submit, shown, workshop):
    (workshop / "experiments/sites/moon.sh").write_text(
        'export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-a b}" SBATCH_PARTITION=gpu\n'
        "site_setup() { PATH=$ROOT/.venv/bin:$PATH; }\n"
    )
    before = sorted(workshop.rglob("*"))
    done, submitted = submit("--dry-run", "--chain", "--snapshot", STAGES, SITE="moon")
    assert (done.returncode, done.stderr, submitted) == (0, "", [])
    silent, _ = submit("--dry-run", STAGES, SITE="moon", NO_CLUSTER=1)
    assert (silent.returncode, silent.stderr.count("warning: sinfo: it fails, so Slurm is not asked")) == (0, 1)
    folder = subprocess.check_output(
        ["bash", "-c", 'printf %q "$1"', "-", workshop / "experiments" / STAGES], text=True
    )
    settings = "SITE=moon SBATCH_ACCOUNT=a\\ b SBATCH_PARTITION=gpu"
    chained = "sbatch --parsable --dependency=afterany:<id of the line above>"
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("cd ")] == [
        f"cd {folder}/pinned_memory && {settings} sbatch --parsable deepspeed_zero2_offload_pinned_memory.slurm",
        f"cd {folder}/zero_1 && {settings} {chained} deepspeed_zero1_offload.slurm",
        f"cd {folder}/zero_2 && {settings} {chained} deepspeed_zero2_offload.slurm",
        f"cd {folder}/zero_3 && {settings} {chained} deepspeed_zero3_offload.slurm",
    ]
    assert f"experiments/{STAGES}/zero_1: site moon, 1 node(s) x 1 rank(s)" in lines
    assert len([line for line in lines if line.endswith("/estimate_memory.py")]) == 4
    assert sorted(workshop.rglob("*")) == before


def test_a_chain_skips_a_rejected_job(submit, workshop):
    done, submitted = submit("--chain", STAGES, MODEL_NAME="bigscience/bloom-3b", REFUSED="zero_1")
    assert done.returncode == 3
    script = f"experiments/{STAGES}/zero_1/deepspeed_zero1_offload.slurm"
    reason = "sbatch: error: Requested node configuration is not available"
    assert done.stderr == f"error: {script}: Slurm refuses it: {reason}; correct the site file or the directives\n"
    assert [arguments.split()[1:-1] for _, _, arguments in submitted] == [
        [],
        ["--dependency=afterany:1"],
        ["--dependency=afterany:2"],
    ]
    folders = ["pinned_memory", "zero_2", "zero_3"]
    assert [folder for folder, _, _ in submitted] == [str(workshop / "experiments" / STAGES / name) for name in folders]
    assert {values.split() == ["laptop", "bigscience/bloom-3b"] for _, values, _ in submitted} == {True}
    first = f"1  experiments/{STAGES}/pinned_memory/deepspeed_zero2_offload_pinned_memory.slurm"
    assert done.stdout.splitlines()[0] == first


def test_the_dry_run_reports_errors(submit, shown, workshop):
    """The dry run reports jobs that Slurm would reject. For an invalid config, its exit code is the estimate's."""
    refused = {"SITE": "laptop", "REFUSED": "zero_1"}
    assert submit("--dry-run", STAGES, NO_CLUSTER=1, **refused)[0].returncode == 0
    done, submitted = submit("--dry-run", STAGES, **refused)
    assert (done.returncode, submitted) == (3, [])
    script = f"{workshop}/experiments/{STAGES}/zero_1/deepspeed_zero1_offload.slurm"
    reason = "sbatch: error: Requested node configuration is not available"
    assert done.stderr == f"error: {script}: Slurm would refuse it: {reason}; correct the site file or the directives\n"
    program(workshop / ".venv/bin", "python", STUB.format("exit 2"))
    assert submit("--dry-run", STAGES, SITE="laptop")[0].returncode == 2


@pytest.mark.parametrize(
    ("target", "cwd", "count"),
    [
        (STAGES, "", 4),
        ("cpu_offloading", "experiments/deepspeed-single-gpu", 4),
        (".", "experiments/deepspeed-single-gpu/cpu_offloading", 4),
        ("../zero_0", "experiments/deepspeed-single-gpu/cpu_offloading", 1),
        ("all", "experiments/baseline", len(EXPERIMENT_SCRIPTS)),
    ],
)
def test_a_target_is_a_family_a_folder_or_a_path(submit, target, cwd, count):
    done, submitted = submit(target, cwd=cwd)
    assert done.returncode == 0, done.stderr
    scripts = [Path(folder, arguments.split()[-1]) for folder, _, arguments in submitted]
    assert all(script.exists() for script in scripts)
    assert len(set(scripts)) == count


def test_all_jobs_of_one_submission_share_a_snapshot(submit, workshop):
    """tests/slurm checks that jobs run the snapshot and record its commit."""
    program(workshop / ".venv/bin", "python", "")
    done, submitted = submit("--snapshot", STAGES)
    assert done.returncode == 0, done.stderr
    (folder,) = (workshop / "snapshots").iterdir()
    assert {str(folder) in values for _, values, _ in submitted} == {True}
    assert (folder / ".venv/bin/python").exists(), "a site finds the environment in $ROOT"


def test_a_change_marks_only_runs_that_read_it_as_dirty(submit, workshop):
    """Check this in the repository and in a snapshot."""

    def dirty(root: Path) -> list[bool]:
        states = []
        for experiment in ("experiments/baseline", "experiments/own/mine"):
            variables = shell_environment(PYTHONPATH=root / "scripts", EXPERIMENT=experiment)
            code = "import json; from records.git_state import git_state; print(json.dumps(git_state()))"
            command = [sys.executable, "-P", "-c", code]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            states.append(json.loads(done.stdout))
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=workshop, text=True).strip()
        assert {state["commit"] for state in states} == {head}
        return [state["dirty"] for state in states]

    def snapshot() -> Path:
        _, submitted = submit("--snapshot", "baseline")
        return Path(submitted[-1][1].removeprefix("laptop").strip())

    shutil.copy(REPOSITORY / ".gitignore", workshop)
    (workshop / "exercises").mkdir()
    (workshop / "exercises/a.py").write_text("...")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *command], cwd=workshop, check=True)
    for name in ("experiments/own/mine/x.slurm", "experiments/baseline/slurm-7.out", "experiments/sites/moon.sh"):
        (workshop / name).parent.mkdir(parents=True, exist_ok=True)
        (workshop / name).touch()
    for name in ("exercises/a.py", "experiments/sites/laptop.sh"):
        with (workshop / name).open("a") as file:
            file.write("# solved\n")
    assert dirty(workshop) == dirty(snapshot()) == [False, True]
    (workshop / "scripts/train.py").write_text("")
    assert dirty(workshop) == dirty(snapshot()) == [True, True]


def test_jobs_with_more_gpus_than_a_node_are_left_out_in_one_line(submit, workshop):
    (workshop / "experiments/sites/four.sh").write_text(': "${GPUS_PER_NODE:=4}"\nsite_setup() { :; }\n')
    done, submitted = submit("--chain", "deepspeed-multi-gpu", SITE="four")
    folders = [Path(folder).relative_to(workshop / "experiments/deepspeed-multi-gpu") for folder, *_ in submitted]
    assert Path("4_gpus") in folders and not {Path("6_gpus"), Path("8_gpus")} & {*folders}
    large = "deepspeed-multi-gpu/6_gpus deepspeed-multi-gpu/8_gpus"
    line = f"left out: GPUS_PER_NODE=4 of the site four is too small for {large}\n"
    assert (done.returncode, done.stderr) == (0, line)
    assert len(submit("--chain", "deepspeed-multi-gpu", SITE="four", GPUS_PER_NODE=8)[1]) == 2 * len(submitted) + 2
    done, _ = submit("deepspeed-multi-gpu/8_gpus", SITE="four")
    assert done.returncode == 2 and done.stderr.startswith("error: deepspeed-multi-gpu/8_gpus: it needs more GPUs per")


@pytest.mark.parametrize(
    ("arguments", "site", "message"),
    [
        (["nope"], "laptop", r"error: nope: there is no such folder below experiments/; see ls experiments"),
        (
            ["efficiency/group_by_length"],
            "laptop",
            r"error: efficiency/group_by_length: is gone; efficiency/no_padding \(PADDING=none\) .*",
        ),
        (["sites"], "laptop", r"error: sites: it holds no \.slurm file; see ls experiments"),
        ([], "laptop", r"error: submit\.sh: nothing to submit; .*"),
        (["--cain", "baseline"], "laptop", r"error: --cain: unknown option; see --help"),
        (["baseline"], "moon", r"error: SITE: there is no experiments/sites/moon\.sh; .*"),
        (["baseline"], "example", r"error: experiments/sites/example\.sh: it still holds CHANGE_ME; .*"),
        (["baseline"], "unset", r"error: experiments/sites/unset\.sh: bash cannot source it, .*"),
    ],
)
def test_a_wrong_submission_gives_one_error_line(submit, workshop, arguments, site, message):
    (workshop / "experiments/sites/unset.sh").write_text(': "$NOT_SET"\n')
    done, submitted = submit(*arguments, SITE=site)
    assert (done.returncode, done.stdout, submitted) == (2, "", [])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(message, lines[0])


def test_help_shows_the_commands(submit):
    done, submitted = submit("--help")
    assert (done.returncode, submitted) == (0, [])
    assert "experiments/submit.sh --chain deepspeed-multi-gpu" in done.stdout
    assert not done.stdout.startswith("#")
