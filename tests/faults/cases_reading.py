"""What the report reads: records and memory logs as killed jobs and full disks leave them, beside a good run."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from bench import Bench
from report_files import SAMPLE, add_run, gpu_log
from table import case

GOOD = "deepspeed-single-gpu/zero_1"
ODD = "deepspeed-single-gpu/zero_2"


def report(bench: Bench) -> tuple[Path, str]:
    """The folder of the report of all runs here, and the rows of its table of all runs."""
    ended = bench.run("runs", "-o", "report", script="scripts/report.py")
    assert "Traceback" not in ended.log
    rows = (bench.folder / "report/runs.md").read_text()
    assert f"| {GOOD} | 1 | completed |" in " ".join(rows.split()).replace(" |", " |"), rows
    return bench.folder / "report", rows


def odd(group: str, name: str, done: str, seen: str, damage: Callable[[Path], object]) -> None:
    """A case with a good run, and another of which `damage` has changed the folder; `seen` is part of what is said."""

    def act(bench: Bench) -> None:
        add_run(bench.folder / "runs", GOOD, "1")
        damage(add_run(bench.folder / "runs", ODD, "2"))
        _, rows = report(bench)
        assert seen in rows, rows

    case(group, name, done, f"the good run beside it is in its table; of the other: {seen}")(act)


def record(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "results/2.json").write_bytes(content)


def changed(**values: object) -> Callable[[Path], object]:
    return record(json.dumps(json.loads(SAMPLE.read_text()) | values).encode())


# fmt: off
odd("report", "torn record", "a record that is cut off", "is no run record", record(SAMPLE.read_bytes()[:500]))
odd("report", "text as a rate", '"train": "fast"', "is no run record (train: ", changed(train="fast"))
odd("logs", "cut off", "a GPU log that ends within a line", ":5: no sample",
    lambda folder: (folder / "gpu_memory/gpu_memory_log_2.csv").write_text(gpu_log(100, 900, 500, 99)[:-25]))
odd("logs", "absent", "no CPU log", "cpu_memory: no log of job 2",
    lambda folder: (folder / "cpu_memory/cpu_memory_log_2.txt").unlink())
# fmt: on


EVIL = "=cmd|'/c calc'!A1 <script>alert(1)</script> ![x](http://evil) `id`"


@case(
    "report",
    "names that act",
    "a model's and an experiment's name with a formula, a script and Markdown",
    "no cell of a CSV begins with = + - @; the page holds no script, and has a policy that allows none",
)
def names_that_act(bench: Bench):
    add_run(bench.folder / "runs", GOOD, "1")
    changed(experiment=EVIL, settings={"model_name": EVIL})(add_run(bench.folder / "runs", ODD, "2"))
    folder, _ = report(bench)
    cells = [cell for path in folder.glob("*.csv") for row in csv.reader(path.open()) for cell in row]
    assert any("cmd|" in cell for cell in cells)
    assert not [cell for cell in cells if cell[:1] in "=+@" and cell], cells
    page = (folder / "index.html").read_text()
    assert "<script" not in page and 'http-equiv="Content-Security-Policy"' in page
