"""Tests of preflight.py's checks of the site file, of Slurm's partitions and of dry runs, with stubs for all three."""

import os
import shutil
import sys

import pytest

from checks import jobs as preflight_jobs
from checks import machine as preflight_machine
from helpers import REPOSITORY
from shell import program


def load(monkeypatch, tmp_path, content: str) -> tuple[str, ...]:
    """Return the check's line for a site file with this content."""
    shutil.copy(REPOSITORY / "experiments" / "load_site.sh", tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "mine.sh").write_text(content)
    monkeypatch.setattr(preflight_machine, "EXPERIMENTS", tmp_path)
    (tmp_path / "site").write_text("mine\n")
    (line,) = preflight_machine.load_site(tmp_path)
    return line


def test_preflight_has_the_same_site_variables_as_a_job(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCH_SIZE", "2")
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    content = 'site_setup() { export LOADED=yes; }\n: "${BATCH_SIZE:=4}" "${NCCL_ALGO:=Ring}"\n'
    assert load(monkeypatch, tmp_path, content)[:2] == ("ok", "site")
    assert {name: os.environ[name] for name in ("BATCH_SIZE", "NCCL_ALGO", "LOADED")} == {
        "BATCH_SIZE": "2", "NCCL_ALGO": "Ring", "LOADED": "yes"}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("export SBATCH_ACCOUNT=CHANGE_ME\n", "mine.sh: it still holds CHANGE_ME"),
        ("site_setup() { module load cuda; }\n", "module: command not found"),
        ("site_setup() { PATH=/nowhere; }\n", "there is no python after site_setup"),
    ],
)
def test_an_incomplete_site_file_is_a_failed_check(monkeypatch, tmp_path, content, problem):
    state, _, found, _ = load(monkeypatch, tmp_path, content)
    assert state == "fail"
    assert problem in found


def test_another_python_at_the_site_gives_a_warning(monkeypatch, tmp_path):
    line = f'exec "{sys.executable}" -c "import sys; sys.prefix = \'/usr\'\n$2" "$3"'
    python = program(tmp_path / "bin", "python", line)
    state, _, found, _ = load(monkeypatch, tmp_path, f"site_setup() {{ PATH={python.parent}:$PATH; }}\n")
    assert (state, found) == ("warn", f"mine: the site's python is in /usr, preflight's python in {sys.prefix}")


def lines_of_slurm(monkeypatch, tmp_path, **tools: str) -> dict[str, tuple]:
    """Return the partition check's lines by name. `tools`: bash lines of the stubs for Slurm's commands."""
    for name, body in ({"sbatch": "", "sinfo": "echo gpu; echo debug"} | tools).items():
        program(tmp_path, name, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return {name: (state, *texts) for state, name, *texts in preflight_machine.partition()}


def test_partition_and_reservation_must_exist_in_slurm(monkeypatch, tmp_path):
    assert lines_of_slurm(monkeypatch, tmp_path) == {"partition": ("ok", "Slurm's default of debug, gpu")}
    down = "echo 'sinfo: error: Unable to contact slurm controller'; exit 1"
    assert lines_of_slurm(monkeypatch, tmp_path, sinfo=down)["partition"][0] == "fail"
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SBATCH_RESERVATION", "workshop")
    # This has the format of `scontrol show reservation`
    found = (
        "echo 'ReservationName=workshop StartTime=2026-12-01T08:00:00 EndTime=2026-12-01T18:00:00 Duration=10:00:00'\n"
        "echo '   Nodes=node[1-2] NodeCnt=2 CoreCnt=4 Features=(null) PartitionName=gpu Flags='\n"
        "echo '   Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE'"
    )
    lines = lines_of_slurm(monkeypatch, tmp_path, scontrol=found)
    assert lines["partition"] == ("ok", "gpu")
    shown = "workshop StartTime=2026-12-01T08:00:00 EndTime=2026-12-01T18:00:00 State=INACTIVE"
    assert lines["reservation"] == ("ok", shown)
    monkeypatch.setenv("SBATCH_PARTITION", "gpus")
    lines = lines_of_slurm(monkeypatch, tmp_path, scontrol="echo Reservation workshop not found; exit 1")
    assert lines["partition"][:2] == ("fail", "gpus is not among debug, gpu")
    assert lines["reservation"][:2] == ("fail", "Reservation workshop not found")


def test_dry_runs_do_not_see_the_variables_of_a_slurm_job(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight_jobs, "EXPERIMENTS", tmp_path)
    sound = 'env | grep -cE "^(DRY_RUN=1|BATCH_SIZE=2|SLURM_JOB_ID=.*)$"\n'
    for job in preflight_jobs.JOBS:
        program(tmp_path / job, "x.slurm", f"[[ $({sound}) = 2 && $PWD = {tmp_path / job} ]]")
    caller = dict(os.environ) | {"BATCH_SIZE": "2", "SLURM_JOB_ID": "7"}
    ((state, name, found),) = preflight_jobs.dry_runs(caller)
    assert (state, name, found) == ("ok", "experiments", f"{', '.join(preflight_jobs.JOBS)} would run")


def test_a_rejected_job_is_a_failed_check(monkeypatch, tmp_path):
    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: Invalid account'; exit 1")
    program(tmp_path / "bin", "scancel", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    lines = list(preflight_jobs.slurm_jobs(tmp_path / "copy", 3, dict(os.environ) | {"SITE": "laptop"}))
    ((state, name, found),) = lines
    assert (state, name) == ("fail", "submit.sh")
    assert "Invalid account" in found
