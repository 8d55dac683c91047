"""Whatever a record, a log or a name holds: the report is made, and the runs beside it keep their rows."""

import copy
import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from report import DEFINITIONS, write_report
from report_files import SAMPLE, add_run, write
from reporting import files
from reporting import runs as report_runs
from reporting.record import LARGEST_FILE
from reporting.render import in_sheet
from reporting.runs import find_runs, read_run
from reporting.tables import build_tables, load_definitions

STAGE = "deepspeed-single-gpu/zero_1"
NEIGHBOUR = "777"
LATER = {"attempt": 2, "restarts": [{"time": "2026-11-20T22:32:40+00:00", "reason": "node failure", "step": 4}]}
LATER |= {"overrides": ["nodes: 3 instead of 2"], "pid": 4711, "exact_match": 1.5, "f1": 2.5}
RECORD = json.loads(SAMPLE.read_text()) | LATER
# As they stand in the file
ODD = {
    "5": "5",
    "negative": "-1",
    "empty text": '""',
    "list": "[]",
    "object": "{}",
    "null": "null",
    "true": "true",
    "infinite": "1e999",
    "huge": "1e308",
    "nan": "NaN",
    "half a surrogate": '"\\ud800"',
    "5000 digits": "9" * 5000,
    "4000 digits": "9" * 4000,
    "tag": '"<script>alert(1)</script>"',
    "formula": '"=cmd()"',
    "table": json.dumps("a|b`c`\n\x1b[2J[x](y)"),
    "deep": "[" * 100_000 + "]" * 100_000,
    "another type inside": "[[{}]]",
}
HERE = "@ here @"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(report_runs, "queued_jobs", lambda: frozenset())


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every leaf and every container."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def hole(path: tuple) -> tuple[str, str]:
    """The record as text before and behind a place."""
    if not path:
        return "", ""
    record = copy.deepcopy(RECORD)
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = HERE
    before, _, behind = json.dumps(record).partition(json.dumps(HERE))
    return before, behind


def report_of(top: Path) -> Path:
    """The report, in which the good run has its row, nothing is rendered, and each table is one."""
    write_report([top], top / "report", all_runs=True)
    assert "<script" not in (top / "report" / "index.html").read_text(encoding="utf-8")
    for path in (top / "report").glob("*.csv"):
        for row in csv.reader(path.open(newline="", encoding="utf-8")):
            assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t", "\r"))]
    for path in (top / "report").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        rows = [line for line in text.split("\n") if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows}) == 1, path
        assert text.replace("\n", "").isprintable()
    assert f"baseline,baseline,{NEIGHBOUR},completed," in (top / "report" / "runs.csv").read_text(encoding="utf-8")
    return top / "report"


def test_mutated_records(tmp_path):
    """All of them are read; those of which each says another thing stand in one report."""
    folder = tmp_path / "experiments" / STAGE
    path = folder / "results" / "1.json"
    different = {}
    path.parent.mkdir(parents=True)
    for place in places(RECORD):
        before, behind = hole(place)
        for odd in ODD.values():
            text = before + odd + behind
            path.unlink(missing_ok=True)  # to write over it would wait for the disk
            path.write_text(text)
            run = read_run(path)
            assert run.has_record or run.problems[0].startswith(f"{path}: is no run record ("), run.problems
            different[repr(run.record) if run.has_record else run.problems[0]] = text
    path.unlink()
    assert 200 < len(different) < 2000
    for number, text in enumerate(different.values(), 1):
        write(folder / "results" / f"{number}.json", text.replace('"job_id": "102"', f'"job_id": "{number}"'))
    add_run(tmp_path, "baseline", NEIGHBOUR)
    written = report_of(tmp_path)
    assert len((written / "runs.csv").read_text().splitlines()) == len(different) + 2


@pytest.mark.parametrize(
    ("place", "odd", "reason"),
    [
        (("nodes",), "5", "nodes: Input should be a valid array"),
        (("world_size",), "1e400", "world_size: Input should be a valid integer"),
        (("world_size",), ODD["4000 digits"], "world_size: Input should be less than or equal to 1000000000000000"),
        (("settings",), "[]", "settings: Input should be an object"),
        (("train", "loss_mean"), "1e308", "train.loss_mean: Value error, 1e+308 is no loss"),
        (("eval", 0, "loss"), '"x"', "eval.0.loss: Input should be a valid number"),
        (("callbacks", "avg_cpu_util_%"), "true", "callbacks.avg_cpu_util_%: Input should be a valid number"),
        (("train", "runtime_s"), "NaN", "train.runtime_s: Value error, nan is nothing that can be measured"),
        (("run_name",), ODD["deep"], "Invalid JSON: recursion limit exceeded"),
        (("run_name",), ODD["half a surrogate"], "Invalid JSON: "),
        (("run_name",), ODD["5000 digits"], "Invalid JSON: number out of range"),
        (("pid",), "-1", "pid: "),
        (("pid",), '"self"', "pid: "),
        (("pid",), "1e9", "pid: "),
        (("job_id",), '"../../etc"', "job_id: "),
        (("started",), "5", "started: "),
    ],
)
def test_reason_names_file_and_field(tmp_path, place, odd, reason):
    folder = add_run(tmp_path, STAGE, "1")
    path = folder / "results" / "1.json"
    write(path, odd.join(hole(place)))
    run = read_run(path)
    assert run.status == "incomplete"
    assert run.problems[0].startswith(f"{path}: is no run record ({reason}")


def test_what_the_report_does_not_read_may_be_anything(tmp_path):
    """Fields that another version adds, and those that only a reader of the record uses."""
    only_shown = (("versions",), ("command",), ("knobs",), ("knobs", "world size"), ("knobs", "precision", "effective"))
    for place in (*only_shown, ("bandwidth",), ("settings", "seed"), ("peak_process_mib",)):
        write(tmp_path / "results" / "1.json", '{"new": [[1e999, {"x": null}]]}'.join(hole(place)))
        assert read_run(tmp_path / "results" / "1.json").status == "completed", place


def test_failed_run_has_few_fields(tmp_path):
    write(tmp_path / "results" / "1.json", '{"schema": 1, "status": "failed", "exit_code": 3, "settings": {}}')
    run = read_run(tmp_path / "results" / "1.json")
    assert (run.status, run.status_note) == ("failed", "exit code 3")


@pytest.mark.timeout(300)  # a reader that waits would do so for ever
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "dangling", "large"])
def test_what_is_no_file_is_not_opened(tmp_path, monkeypatch, kind):
    def make(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "large":
            path.touch()
            os.truncate(path, LARGEST_FILE + 1)
        else:
            path.symlink_to("/dev/zero" if kind == "endless" else "nowhere")

    add_run(tmp_path, "baseline", NEIGHBOUR)
    make(add_run(tmp_path, STAGE, "1") / "results" / "1.json")
    folder = add_run(tmp_path, STAGE, "2", world_size=1)
    for log in ("gpu_memory/gpu_memory_log_2.csv", "cpu_memory/cpu_memory_log_2.txt", "log/zero_1_2.out"):
        make(folder / log)
    rows = (report_of(tmp_path) / "runs.csv").read_text().splitlines()
    (broken,) = [row for row in rows if row.startswith(f"{STAGE},{STAGE},1,")]
    assert f"incomplete: {tmp_path}/experiments/{STAGE}/results/1.json: " in broken
    (no_logs,) = [row for row in rows if row.startswith(f"{STAGE},{STAGE},2,")]
    assert ',"completed, incomplete",' in no_logs


ODD_NAMES = [
    "=cmd()",
    "-1",
    "a|b",
    "<script>",
    "`x`",
    "[x](y)",
    "new\nline",
    "\x1b[31m",
    "\u202etxt",
    "\\",
    "*",
    "[",
    "\udcff",
]


def test_names_do_nothing_where_they_are_shown(tmp_path):
    add_run(tmp_path, "baseline", NEIGHBOUR)
    for number, name in enumerate(ODD_NAMES):
        folder = tmp_path / "experiments" / name
        write(folder / "results" / f"{name}.json", "{}")
        write(folder / "gpu_memory" / f"gpu_memory_log_{name}.csv", name.encode(errors="replace"))
        shown = name.encode(errors="replace").decode()
        add_run(tmp_path, STAGE, str(number), settings__model_name=shown)
        add_run(tmp_path, shown, "1000")
    written = report_of(tmp_path)
    rows = list(csv.reader((written / "runs.csv").open(newline="")))
    assert ["'=cmd()", "'=cmd()", "'=cmd()", "incomplete"] in [row[:4] for row in rows]
    assert ["'-1", "'-1", "'-1", "incomplete"] in [row[:4] for row in rows]
    assert "&lt;script&gt;" in (written / "index.html").read_text()
    assert "\\<script>" in (written / "runs.md").read_text()
    assert "\\\\x1b\\[31m" in (written / "runs.md").read_text()


def test_numbers_stay_numbers_in_a_sheet():
    assert [in_sheet(value) for value in (-1.5, -2, None, "-2", "1-2", "\t=1")] == [
        -1.5,
        -2,
        None,
        "'-2",
        "1-2",
        "'\\t=1",
    ]


def test_models_of_like_names_have_tables_of_their_own(tmp_path):
    names = ["a/tiny_bloom", "b/tiny-bloom", "Tiny.Bloom", "tiny-bloom-2", "x" * 300]
    for number, name in enumerate(names):
        add_run(tmp_path, STAGE, str(number), settings__model_name=name)
    tables = build_tables(load_definitions(DEFINITIONS), find_runs([tmp_path]))
    found = {table.name for table in tables if table.name.startswith("zero-stages-")}
    assert len(found) == len(names)
    assert all(len(name) < 100 for name in found)


def test_trainer_lines_of_any_kind(tmp_path, monkeypatch):
    """A plot is drawn from those that are some."""
    from reporting.trainer_log import entries

    monkeypatch.setattr(files, "BLOCK", 100)
    lines = ["{'loss': '2.5', 'epoch': '0.5'}", "{'loss': 2.5, 'epoch': 1}", "{'a': [1, 2]}", "{'loss': 'x'}",
             "{'a': " + "(" * 9000 + "}", "\r 50%|  | {'loss': '1e999', 'epoch': 'nan'}", "{'cut': '1"]  # fmt: skip
    write(tmp_path / "log", "\n".join(lines))
    found = list(entries(tmp_path / "log"))
    assert found[:2] == [{"loss": 2.5, "epoch": 0.5}, {"loss": 2.5, "epoch": 1.0}]
    assert len(found) == 3
    folder = add_run(tmp_path, "baseline", NEIGHBOUR)
    write(folder / "log" / f"baseline_{NEIGHBOUR}.out", "\n".join([*lines, "{'loss': '1e308', 'epoch': '-1e308'}"]))
    assert (report_of(tmp_path) / "baseline-loss.png").exists()
