"""preflight.py: the site, as bash reads its file, and what Slurm says of it, with stand-ins for its commands."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from checks import machine as preflight_machine
from checks.machine import Site
from helpers import REPOSITORY
from shell import program

MINE = Site("mine")


def load(monkeypatch, tmp_path, content: str) -> Site:
    shutil.copy(REPOSITORY / "experiments" / "load_site.sh", tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "mine.sh").write_text(content)
    monkeypatch.setattr(preflight_machine, "EXPERIMENTS", tmp_path)
    (tmp_path / "site").write_text("mine\n")
    return preflight_machine.load_site(tmp_path)


def test_variables_of_the_site_are_those_of_its_jobs(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCH_SIZE", "2")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    content = 'site_setup() { export LOADED=yes; }\n: "${BATCH_SIZE:=4}" "${NCCL_ALGO:=Ring}"\n'
    assert load(monkeypatch, tmp_path, content) == Site("mine")
    assert {name: os.environ[name] for name in ("BATCH_SIZE", "NCCL_ALGO", "LOADED")} == {
        "BATCH_SIZE": "2", "NCCL_ALGO": "Ring", "LOADED": "yes"}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "# CHANGE_ME in a comment\nexport SBATCH_ACCOUNT=CHANGE_ME\n",
            "mine.sh: it still holds CHANGE_ME",
        ),
        ("site_setup() { module load cuda; }\n", "module: command not found"),
        ("site_setup() { PATH=/nowhere; }\n", "there is no python after site_setup"),
    ],
)
def test_a_site_file_that_is_not_complete(monkeypatch, tmp_path, content, problem):
    site = load(monkeypatch, tmp_path, content)
    assert site.name == "", "its variables are unknown"
    assert problem in site.problem
    assert next(preflight_machine.check_site(site))[:2] == ("fail", "site")


def test_the_python_of_the_site_should_be_the_one_that_checks(monkeypatch, tmp_path):
    line = f'exec {sys.executable} -c "import sys; sys.prefix = \'/usr\'\n$2" "$3"'
    python = program(tmp_path / "bin", "python", line)
    site = load(monkeypatch, tmp_path, f"site_setup() {{ PATH={python.parent}:$PATH; }}\n")
    assert site.problem == f"mine: its python is in /usr, this one in {sys.prefix}"
    assert next(preflight_machine.check_site(site))[:2] == ("warn", "site")


def lines_of_the_site(monkeypatch, tmp_path, site: Site = MINE, **tools: str) -> dict[str, tuple]:
    """The lines about the site, by name, with commands of Slurm that run these lines of bash."""
    for name, body in ({"sbatch": "", "sinfo": "echo gpu; echo debug"} | tools).items():
        program(tmp_path, name, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return {name: (state, *texts) for state, name, *texts in preflight_machine.check_site(site)}


def test_partition_and_reservation_are_those_that_slurm_knows(monkeypatch, tmp_path):
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert "reservation" not in lines_of_the_site(monkeypatch, tmp_path)
    monkeypatch.setenv("SBATCH_RESERVATION", "workshop")
    # as scontrol show reservation prints them
    found = (
        "echo 'ReservationName=workshop StartTime=2026-12-01T08:00:00 EndTime=2026-12-01T18:00:00 Duration=10:00:00'\n"
        "echo '   Nodes=node[1-2] NodeCnt=2 CoreCnt=4 Features=(null) PartitionName=gpu Flags='\n"
        "echo '   Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE'"
    )
    lines = lines_of_the_site(monkeypatch, tmp_path, scontrol=found)
    assert lines["partition"] == ("ok", "gpu")
    shown = "workshop StartTime=2026-12-01T08:00:00 EndTime=2026-12-01T18:00:00 State=INACTIVE"
    assert lines["reservation"] == ("ok", shown)
    monkeypatch.setenv("SBATCH_PARTITION", "gpus")
    lines = lines_of_the_site(monkeypatch, tmp_path, scontrol="echo Reservation workshop not found; exit 1")
    assert lines["partition"][:2] == ("fail", "there is no gpus among debug, gpu")
    assert lines["reservation"][:2] == ("fail", "Reservation workshop not found")


def test_what_depends_on_a_site_that_was_not_read_is_skipped(monkeypatch, tmp_path):
    """Its SBATCH_ variables are unknown: Slurm's answers would be about others."""
    monkeypatch.setenv("SBATCH_PARTITION", "gpus")
    lines = lines_of_the_site(monkeypatch, tmp_path, Site("", "module: command not found"))
    assert lines["site"][0] == "fail"
    assert lines["partition"] == ("skip", "the site was not read")
    assert list(preflight_machine.nccl(Site("")))[-1] == ("skip", "interfaces", "the site was not read")
