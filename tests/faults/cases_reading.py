"""What the report reads: records and memory logs of any content, beside a good run."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

from bench import Bench
from report_files import CPU_HEADER, GPU_HEADER, SAMPLE, add_run, cpu_log, gpu_log
from table import case

GOOD = "deepspeed-single-gpu/zero_1"
ODD = "deepspeed-single-gpu/zero_2"
GOOD_ROW = "the good run beside it is in its table"


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

    case(group, name, done, f"{GOOD_ROW}; of the other: {seen}")(act)


def record(content: str | bytes) -> Callable[[Path], object]:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "results/2.json").write_bytes(content)


def changed(**values: object) -> Callable[[Path], object]:
    return record(json.dumps(json.loads(SAMPLE.read_text()) | values))


def instead(key: str, text: str) -> Callable[[Path], object]:
    """A value as a text that json.dumps would not write."""
    sample = json.dumps(json.loads(SAMPLE.read_text()) | {key: "HERE"})
    return record(sample.replace('"HERE"', text))


def pipe(name: str) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


# fmt: off
NO_RECORD = "is no run record"
odd("report", "empty record", "an empty record", NO_RECORD, record(""))
odd("report", "torn record", "a record that is cut off", NO_RECORD, record(SAMPLE.read_bytes()[:500]))
odd("report", "list as a record", "a record that is a list", NO_RECORD, record("[1]"))
odd("report", "foreign bytes", "a record that is no text", NO_RECORD, record(b"\xff\xfe\x00"))
odd("report", "no settings", '"settings": []', NO_RECORD, changed(settings=[]))
odd("report", "nodes as a number", '"nodes": 5', NO_RECORD, changed(nodes=5))
odd("report", "endless number", '"world_size": 1e400', NO_RECORD, instead("world_size", "1e400"))
odd("report", "5,000 digits", "a number of 5,000 digits", NO_RECORD, instead("train_size", "9" * 5000))
odd("report", "text as a rate", '"train": "fast"', NO_RECORD, changed(train="fast"))
odd("report", "list as a status", '"status": []', NO_RECORD, changed(status=[]))
odd("report", "date of no calendar", '"started": "yesterday"', NO_RECORD, changed(started="yesterday"))
odd("report", "lone surrogate", "half of a character as the model's name", NO_RECORD,
    record(json.dumps(json.loads(SAMPLE.read_text()) | {"experiment": "\ud800"})))
odd("report", "deep nesting", "100,000 lists in each other", NO_RECORD, record("[" * 100_000))
odd("report", "pipe", "a FIFO as a record", "not a regular file", pipe("results/2.json"))

LINE = "2026/11/20 22:00:15.000, 0, Tesla V100-SXM2-32GB, {}, 32768\n"
LOG = gpu_log(100, 900, 500)


def gpu(content: str | bytes) -> Callable[[Path], object]:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "gpu_memory/gpu_memory_log_2.csv").write_bytes(content)


def cpu(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "cpu_memory/cpu_memory_log_2.txt").write_text(content)


odd("logs", "cut off", "a GPU log that ends within a line", ":5: no sample", gpu(LOG + LINE.format(99)[:30]))
odd("logs", "empty", "a GPU log without a sample", "no sample", gpu(GPU_HEADER))
odd("logs", "not available", "a GPU that does not tell its memory", ":5: no sample", gpu(LOG + LINE.format("[N/A]")))
odd("logs", "NaN", "NaN for a sample", ":5: no sample", gpu(LOG + LINE.format("nan")))
odd("logs", "foreign bytes", "bytes that are no text", ":5: not UTF-8", gpu(LOG.encode() + b"\xff\xfe\x00\n"))
odd("logs", "other program", "the log of another program", ":1: ", gpu("timestamp, power.draw\n1, 2\n"))
odd("logs", "restarted", "a second header, of a logger that began anew", "another header", cpu(cpu_log(9, 8) * 2))
odd("logs", "header alone", "a CPU log without a sample", "no sample", cpu(CPU_HEADER + "\n"))
odd("logs", "absent", "no CPU log", "cpu_memory: no log of job 2",
    lambda folder: (folder / "cpu_memory/cpu_memory_log_2.txt").unlink())
odd("logs", "pipe", "a FIFO as a log", "ot a regular file", pipe("gpu_memory/gpu_memory_log_2.csv"))
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


SIZE = """
import atexit, resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
atexit.register(lambda: print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MiB"))
import runpy
sys.argv = ["scripts/report.py", "runs", "-o", "report"]
runpy.run_path("scripts/report.py", run_name="__main__")
"""


@case(
    "logs",
    "a million lines",
    "a GPU log of a million lines",
    "its peak is right, and the report takes less than 200 MiB for it",
    slow="writes and reads 60 MB",
)
def million_lines(bench: Bench):
    folder = add_run(bench.folder / "runs", GOOD, "1")
    lines = [LINE.format(number % 30_000) for number in range(1_000_000)]
    (folder / "gpu_memory/gpu_memory_log_1.csv").write_text(f"{GPU_HEADER}\n{''.join(lines)}")
    bench.write("sized.py", f"import sys\nsys.path.insert(0, 'scripts')\nimport report\n{SIZE}")
    ended = bench.run(script="sized.py")
    assert int(ended.out.split()[-2]) < 200, ended.out
    assert "29,999" in (bench.folder / "report/runs.md").read_text().replace("29999", "29,999")
