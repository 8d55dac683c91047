"""experiments/submit.sh, with a stand-in for sbatch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import EXPERIMENT_SCRIPTS
from shell import program, shell_environment


@pytest.fixture
def submit(workshop, tmp_path):
    """Runs submit.sh with a stand-in for sbatch that numbers the jobs and notes folder, arguments and variables."""
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

    def run(*arguments: str, cwd: str = "", **variables: object):
        environment = shell_environment(**variables)
        environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
        command = [workshop / "experiments/submit.sh", *arguments]
        done = subprocess.run(
            command, cwd=workshop / cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        words = noted.read_text().split("\0")[:-1] if noted.exists() else []
        return done, [tuple(words[i : i + 3]) for i in range(0, len(words), 3)]

    return run


@pytest.fixture
def checked(workshop, tmp_path):
    """A python for which every experiment is right, at once; gives the scripts that it was to check."""
    noted = tmp_path / "checked"
    lines = f"""if [[ $1 = */check_experiment.py ]]; then
  printf '%s\\0' "${{@:2}}" >'{noted}'
else
  exec '{sys.executable}' "$@"
fi"""
    program(workshop / ".venv/bin", "python", lines)
    return lambda: [word for word in noted.read_text().split("\0") if word not in ("", "--memory")]


STAGES = "deepspeed-single-gpu/cpu_offloading"


def test_dry_run_shows_the_exact_lines(submit, checked, workshop):
    (workshop / "experiments/sites/moon.sh").write_text(
        'export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-a b}" SBATCH_PARTITION=gpu\n'
    )
    done, submitted = submit("--dry-run", "--chain", STAGES, SITE="moon")
    assert (done.returncode, done.stderr, submitted) == (0, "", [])
    folder = subprocess.check_output(
        ["bash", "-c", 'printf %q "$1"', "-", workshop / "experiments" / STAGES], text=True
    )
    settings = "SBATCH_ACCOUNT=a\\ b SBATCH_PARTITION=gpu SITE=moon"
    chained = "sbatch --parsable --dependency=afterany:<id of the line above>"
    assert done.stdout.splitlines() == [
        f"cd {folder}/pinned_memory && {settings} sbatch --parsable deepspeed_zero2_offload_pinned_memory.slurm",
        f"cd {folder}/zero_1 && {settings} {chained} deepspeed_zero1_offload.slurm",
        f"cd {folder}/zero_2 && {settings} {chained} deepspeed_zero2_offload.slurm",
        f"cd {folder}/zero_3 && {settings} {chained} deepspeed_zero3_offload.slurm",
    ]


def test_a_line_of_the_dry_run_does_what_it_says(submit, checked, tmp_path):
    done, _ = submit("--dry-run", "baseline", SITE="laptop", SBATCH_ACCOUNT="$(touch pwned) x")
    environment = shell_environment(SITE=None)
    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
    subprocess.run(["bash", "-c", done.stdout], env=environment, check=True, capture_output=True)
    folder, values, arguments = (tmp_path / "noted").read_text().split("\0")[:3]
    assert folder.endswith("experiments/baseline")
    assert (values.strip(), arguments) == ("laptop $(touch pwned) x", "--parsable baseline.slurm")


def test_a_chain_waits_for_the_job_before(submit, checked, workshop):
    done, submitted = submit("--chain", STAGES, MODEL_NAME="bigscience/bloom-3b")
    assert done.returncode == 0, done.stderr
    assert [arguments.rpartition(" ")[0] for _, _, arguments in submitted] == [
        "--parsable",
        *(f"--parsable --dependency=afterany:{number}" for number in (1, 2, 3)),
    ]
    folders = ["pinned_memory", "zero_1", "zero_2", "zero_3"]
    assert [folder for folder, _, _ in submitted] == [str(workshop / "experiments" / STAGES / name) for name in folders]
    assert {values.split() == ["laptop", "bigscience/bloom-3b"] for _, values, _ in submitted} == {True}
    assert done.stdout.splitlines()[0].split("  ") == [
        "1",
        f"experiments/{STAGES}/pinned_memory/deepspeed_zero2_offload_pinned_memory.slurm",
    ]


def test_what_slurm_refuses_is_named_and_the_others_are_submitted(submit, checked):
    done, submitted = submit("--chain", STAGES, SITE="laptop", REFUSED="zero_1")
    assert [Path(folder).name for folder, _, _ in submitted] == ["pinned_memory", "zero_2", "zero_3"]
    assert [arguments.split()[1:-1] for _, _, arguments in submitted] == [
        [],
        ["--dependency=afterany:1"],
        ["--dependency=afterany:2"],
    ]
    assert done.returncode == 3
    script = f"experiments/{STAGES}/zero_1/deepspeed_zero1_offload.slurm"
    assert done.stderr.splitlines() == [
        f"error: {script}: Slurm refuses it: Requested node configuration is not available; "
        "correct the site file or the directives"
    ]


def test_the_dry_run_says_what_slurm_would_refuse(submit, checked):
    done, submitted = submit("--dry-run", STAGES, SITE="laptop", REFUSED="zero_1")
    assert (done.returncode, submitted) == (0, [])
    assert len(done.stdout.splitlines()) == 4
    script = f"experiments/{STAGES}/zero_1/deepspeed_zero1_offload.slurm"
    reason = "Requested node configuration is not available"
    assert done.stderr == f"warning: {script}: Slurm would refuse it: {reason}\n"


@pytest.mark.parametrize(
    ("target", "cwd", "count"),
    [
        (STAGES, "", 4),
        (f"experiments/{STAGES}/", "", 4),
        (f"{STAGES}/zero_1", "experiments", 1),
        ("cpu_offloading", "experiments/deepspeed-single-gpu", 4),
        (".", "experiments/deepspeed-single-gpu/cpu_offloading", 4),
        ("../zero_0", "experiments/deepspeed-single-gpu/cpu_offloading", 1),
        ("all", "experiments/baseline", len(EXPERIMENT_SCRIPTS)),
    ],
)
def test_a_target_is_a_family_a_folder_or_a_path(submit, checked, target, cwd, count):
    done, submitted = submit(target, cwd=cwd)
    assert done.returncode == 0, done.stderr
    scripts = [Path(folder, arguments.split()[-1]) for folder, _, arguments in submitted]
    assert all(script.exists() for script in scripts)
    assert len({(folder, arguments) for folder, _, arguments in submitted}) == count
    assert list(map(str, scripts)) == checked()


def test_all_experiments_of_the_workshop_can_be_submitted(submit):
    done, submitted = submit("all", SITE="laptop")
    assert (done.returncode, done.stderr, len(submitted)) == (0, "", len(EXPERIMENT_SCRIPTS))


def test_if_one_experiment_is_wrong_none_is_submitted(submit, workshop):
    (workshop / "experiments" / STAGES / "zero_2/log/.gitignore").unlink()
    (workshop / "experiments" / STAGES / "zero_2/log").rmdir()
    done, submitted = submit(STAGES)
    assert (done.returncode, done.stdout, submitted) == (2, "", [])
    assert re.fullmatch(r"error: \S.*/zero_2/deepspeed_zero2_offload\.slurm: there is no log/ .*\n", done.stderr)


def test_a_snapshot_is_frozen_once_for_all_and_knows_its_commit(submit, checked, workshop):
    for arguments in (["init", "-q"], ["add", "-A", ":!.venv"], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=workshop, check=True)
    done, submitted = submit("--snapshot", STAGES)
    assert done.returncode == 0, done.stderr
    (folder,) = (workshop / "snapshots").iterdir()
    assert {str(folder) in values for _, values, _ in submitted} == {True}
    for name in ("scripts/train.py", f"experiments/{STAGES}/pinned_memory", "ds_configs/zero2.json", "fsdp_configs"):
        assert (folder / name).exists()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=workshop, text=True).strip()
    assert json.loads((folder / "git.json").read_text()) == {"commit": head, "dirty": True}  # .venv is untracked here
    assert (folder / ".venv/bin/python").exists(), "a site finds the environment in $ROOT"


def test_nothing_is_submitted_without_a_whole_snapshot(submit, checked, workshop):
    shutil.rmtree(workshop / "data")
    done, submitted = submit("--snapshot", "baseline")
    assert (done.returncode, submitted) == (2, [])
    assert re.search(r"^error: \S.*: the snapshot is not complete; ", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "site", "message"),
    [
        (["nope"], "laptop", r"error: nope: there is no such folder below experiments/; see ls experiments"),
        (["sites"], "laptop", r"error: sites: it holds no \.slurm file; see ls experiments"),
        ([], "laptop", r"error: submit\.sh: nothing to submit; .*"),
        (["a", "b"], "laptop", r"error: b: one target at a time; see --help"),
        (["--cain", "baseline"], "laptop", r"error: --cain: unknown option; see --help"),
        (["baseline"], None, r"error: SITE: no site is chosen; .*"),
        (["baseline"], "moon", r"error: SITE: there is no experiments/sites/moon\.sh; .*"),
        (["baseline"], "example", r"error: experiments/sites/example\.sh: it still holds CHANGE_ME; .*"),
        (["baseline"], "unset", r"error: experiments/sites/unset\.sh: bash cannot source it, .*"),
        (["baseline"], "syntax", r"error: experiments/sites/syntax\.sh: bash cannot source it, .*"),
    ],
)
def test_what_cannot_be_submitted_is_one_error_line(submit, workshop, arguments, site, message):
    (workshop / "experiments/sites/unset.sh").write_text(': "$NOT_SET"\n')
    (workshop / "experiments/sites/syntax.sh").write_text("if\n")
    done, submitted = submit(*arguments, SITE=site)
    assert (done.returncode, done.stdout, submitted) == (2, "", [])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(message, lines[0])


def test_what_will_not_fit_is_said_and_submitted(submit, workshop):
    """The variables of the site and those that were given reach the check; its verdicts: test_check_experiment.py."""
    (workshop / "experiments/sites/moon.sh").write_text(': "${GPU_MEMORY:=32}"\nsite_setup() { :; }\n')
    done, submitted = submit("deepspeed-single-gpu", SITE="moon", MODEL_NAME="bigscience/bloom-3b")
    assert (done.returncode, len(submitted)) == (0, 8)
    assert re.search(r"warning: deepspeed-single-gpu/zero_1: about \d+ GiB per GPU, and one has 32; lower", done.stderr)
    way_out = r"about \d+ GiB per node, and the job asks for 32; set SBATCH_MEM_PER_NODE=\d+G"
    assert re.search(rf"warning: {STAGES}/zero_3: {way_out}", done.stderr)


def test_a_site_whose_gpu_memory_is_no_number_is_an_error(submit, workshop):
    (workshop / "experiments/sites/moon.sh").write_text(': "${GPU_MEMORY:=32}"\nsite_setup() { :; }\n')
    done, submitted = submit("baseline", SITE="moon", GPU_MEMORY="32GB")
    assert (done.returncode, submitted) == (2, [])
    assert re.fullmatch(r"error: GPU_MEMORY: '32GB' is no number of GiB; .*\n", done.stderr)


def test_a_dry_run_shows_the_knobs_that_were_given(submit, checked):
    done, _ = submit("--dry-run", "baseline", SITE="laptop", MODEL_NAME="my model", TRAIN_SIZE=8)
    assert "MODEL_NAME=my\\ model TRAIN_SIZE=8 SITE=laptop sbatch --parsable baseline.slurm" in done.stdout


def test_help_shows_the_commands(submit):
    done, submitted = submit("--help")
    assert (done.returncode, submitted) == (0, [])
    assert "experiments/submit.sh --chain deepspeed-multi-gpu" in done.stdout
    assert not done.stdout.startswith("#")
