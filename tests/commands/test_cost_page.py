"""The commands of docs/cost.md, as a participant types them: the report of the modelled runs, and the awk lines."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY, bash_blocks
from records.schema import read_record

PAGE = REPOSITORY / "docs" / "cost.md"
SOLUTION = REPOSITORY / "exercises" / "solution" / "cost.md"
COST = Path("exercises", "cost")


def blocks(page: Path) -> list[str]:
    return [text for _, text in bash_blocks(page)]


def shell(command: str, folder: Path) -> str:
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)}
    streams = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=False, **streams)
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout


@pytest.fixture
def clone(tmp_path):
    """A folder that looks like the repository to the commands. They write into it."""
    shutil.copytree(REPOSITORY / COST, tmp_path / COST)
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    return tmp_path


def records(folder: Path) -> dict:
    return {path.stem: read_record(path) for path in sorted(folder.glob("results/*.json"))}


@pytest.mark.promise("cost: its commands work, and the energy of its modelled runs follows from their logs")
def test_the_report_shows_the_modelled_runs_with_their_energy_and_curves(clone):
    report, _ = blocks(PAGE)
    assert shell(report, clone).startswith("5 runs, ")
    with (clone / "report-cost" / "cost.csv").open() as file:
        rows = {row["job_id"]: row for row in csv.DictReader(file)}
    runs = records(clone / COST)
    assert rows.keys() == runs.keys()
    for job, record in runs.items():
        row = rows[job]
        assert row["status"] == record.status and "incomplete" not in row["remarks"], row
        if record.energy:
            assert float(row["kWh"]) == record.energy.kwh
            assert float(row["J per question"]) == record.energy.joules_per_question
        else:
            assert not row["kWh"] and "the run's status is failed" in row["remarks"]
    page = (clone / "report-cost" / "index.html").read_text()
    assert "What a run costs: memory and GPU power over time" in page and "no GPU was measured" in page


def kwh(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(\S+) kWh$", text, re.MULTILINE)]


@pytest.mark.promise("cost: its commands work, and the energy of its modelled runs follows from their logs")
def test_the_awk_lines_give_the_energy_of_a_log(clone):
    _, awk = blocks(PAGE)
    for job, record in records(clone / COST).items():
        if record.energy:
            printed = shell(awk.replace("log_A", f"log_{job}"), clone)
            whole, later = kwh(printed)
            assert later < whole == pytest.approx(record.energy.kwh, rel=0.015), job
            samples = re.findall(r"^2027/01/11 0[89]:\d\d:\d5\.000 \d+\.\d\d \d+$", printed, re.MULTILINE)
            assert len(samples) == (record.finished - record.started).total_seconds() / 10 + 1


def test_the_awk_lines_of_the_solution_give_the_energy_of_the_hang(clone):
    (awk,) = blocks(SOLUTION)
    text = SOLUTION.read_text(encoding="utf-8")
    whole, hang = kwh(shell(awk, clone))
    assert f"{whole:.4f}, from the log" in text and f"{hang:.4f} kWh" in text
    assert hang > records(clone / COST)["D"].energy.kwh
    assert hang == pytest.approx(2 * 100 * 600 / 3.6e6)
