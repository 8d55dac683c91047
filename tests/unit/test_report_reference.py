"""A report beside a reference: copies of a real report with an outlier, a failed run, other settings, and damage."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

import report
from helpers import REPOSITORY
from report_files import RUNS, add_run, gpu_log
from reporting import reference
from reporting.metrics import METRICS, RELATIONS, Cell, Compared
from reporting.reference import BANDS, NOT_COMPARED, Number, Report, beside, compare, read_reference, write_numbers
from reporting.runs import find_runs
from reporting.tables import Row, Table, build_tables, load_definitions

DEFINITIONS = load_definitions(report.DEFINITIONS)
BASELINE = "baseline/results/101.json"
STAGE_1 = "deepspeed-single-gpu/zero_1/results/102.json"
V100 = {"gpu": "Tesla V100-SXM2-32GB", "gpus": 1, "cpu": "AMD EPYC", "cpus": 2}
STAGES = "zero-stages-tiny-bloom"


def copy_of_the_runs(top: Path, gpus: bool = False) -> Path:
    """The checked-in runs, which are of a CPU, as they are or as if a GPU had measured the same."""
    shutil.copytree(RUNS, top)
    for path in top.rglob("results/*.json") if gpus else ():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"hardware": V100}))
    return top


def change(top: Path, name: str, **changes: object) -> None:
    """Change a record; train__runtime_s=5 is the value in its `train`, a function computes from what is there."""
    path = top / "experiments" / name
    record = json.loads(path.read_text())
    for where, value in changes.items():
        *parents, last = where.split("__")
        inner = record
        for key in parents:
            inner = inner[key]
        inner[last] = value(inner[last]) if callable(value) else value
    path.write_text(json.dumps(record))


def tables_of(top: Path, all_runs: bool = False) -> list[Table]:
    return build_tables(DEFINITIONS, find_runs([top]), all_runs)


def reference_of(top: Path, all_runs: bool = False) -> Path:
    """The folder of a report of these runs, of which only report.json is there."""
    folder = top / "reference"
    folder.mkdir()
    write_numbers(tables_of(top, all_runs), folder)
    return folder


def compared(own: Path, other: Path) -> tuple[list[Table], list[str]]:
    """Tables and summary of one's own runs beside the folder of a reference."""
    tables = tables_of(own)
    return tables, compare(tables, read_reference(other, own / "report"), other)


def row_of(tables: list[Table], name: str, label: str) -> Row:
    return next(row for table in tables if table.name == name for row in table.rows if row.label == label)


def cell_of(tables: list[Table], name: str, label: str, column: str) -> Cell:
    table = next(table for table in tables if table.name == name)
    return row_of(tables, name, label).cells[table.columns.index(column)]


def of_reference(row: Row) -> list[str]:
    return [remark for remark in row.remarks if "reference" in remark]


@pytest.fixture
def two(tmp_path) -> Callable[..., tuple[Path, Path]]:
    """Makes one's own copy of the runs and the instructor's."""

    def copies(gpus: bool = False) -> tuple[Path, Path]:
        return copy_of_the_runs(tmp_path / "own", gpus), copy_of_the_runs(tmp_path / "theirs", gpus)

    return copies


# --- the whole command


def test_report_beside_a_copy_of_itself(tmp_path, main_of, capsys):
    for _ in range(2):  # a second report replaces the first
        main_of(report, RUNS, "-o", tmp_path / "theirs")
    (tmp_path / "handed").mkdir()
    shutil.copy(tmp_path / "theirs" / "report.json", tmp_path / "handed" / "ours.json")
    capsys.readouterr()
    main_of(report, RUNS, "-o", tmp_path / "own", "--reference", tmp_path / "theirs")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"12 runs, 9 tables: {tmp_path}/own/index.html",
        f"Against the reference {tmp_path}/theirs: 87 numbers within, 0 outside, 1 row not compared.",
        "Some of these runs are of a CPU, where the bands are wide: 50 % for a speed, instead of 10 % on GPUs.",
        f"Not compared, not completed here and in the reference: {STAGES} (Stage 3).",
    ]
    page = (tmp_path / "own" / "index.html").read_text()
    assert all(line in page for line in lines[1:])
    assert (tmp_path / "own" / "report.json").read_text() == (tmp_path / "theirs" / "report.json").read_text()
    main_of(report, RUNS, "-o", tmp_path / "own", "--reference", tmp_path / "handed" / "ours.json")
    assert "ours.json: 87 numbers within, 0 outside, 1 row not compared." in capsys.readouterr().out


def test_tables_of_a_report_say_what_is_outside(tmp_path, main_of, capsys):
    theirs = reference_of(copy_of_the_runs(tmp_path / "theirs"))
    own = copy_of_the_runs(tmp_path / "own")
    change(own, BASELINE, train__samples_per_second=lambda rate: rate / 3)
    main_of(report, own, "-o", tmp_path / "report", "--reference", theirs)
    assert "86 numbers within, 1 outside in 1 row, 1 row not compared.\n" in capsys.readouterr().out
    remark = "outside the bands of the reference: Training Speed (samples/sec) -67 % of 6.274"
    for name in ("baseline.md", "baseline.csv", "index.html"):
        assert remark in (tmp_path / "report" / name).read_text(), name


def test_own_numbers_stay_those_of_the_run(two):
    """With a reference the tables hold the same values as without one."""
    own, theirs = two()
    change(theirs, BASELINE, train__loss_mean=1.5, train__samples_per_second=99)
    plain = {(t.name, r.label): [c.value for c in r.cells] for t in tables_of(own) for r in t.rows}
    tables, _ = compared(own, reference_of(theirs))
    assert {(t.name, r.label): [c.value for c in r.cells] for t in tables for r in t.rows} == plain


# --- bands


@pytest.mark.parametrize(("gpus", "faster", "words", "within"), [
    (True, 1.08, "+8.0", True), (True, 0.92, "-8.0", True), (True, 1.12, "+12", False), (True, 0.88, "-12", False),
    (False, 1.12, "+12", True), (False, 1.45, "+45", True), (False, 1.55, "+55", False), (False, 0.45, "-55", False),
])  # fmt: skip
def test_outlier(two, gpus, faster, words, within):
    """A speed that is some percent off; on a CPU much more is within."""
    own, theirs = two(gpus)
    change(own, BASELINE, train__steady_samples_per_second=lambda rate: rate * faster)
    tables, summary = compared(own, reference_of(theirs))
    found = cell_of(tables, "baseline", "Baseline", "steady_samples_per_second").compared
    assert found == Compared(f"{words} % of 7.501", within)
    assert ("0 outside" in summary[0]) == within
    assert ("1 outside in 1 row" in summary[0]) == (not within)
    assert ("Outside: baseline (Baseline)." in summary) == (not within)
    assert any("of a CPU" in line for line in summary) != gpus


@pytest.mark.parametrize("side", ["own", "theirs"])
def test_bands_are_those_of_a_cpu_where_one_side_is_one(tmp_path, side):
    for name in ("own", "theirs"):
        copy_of_the_runs(tmp_path / name, gpus=name != side)
    change(tmp_path / "own", BASELINE, train__steady_samples_per_second=lambda rate: rate * 1.4)
    tables, summary = compared(tmp_path / "own", reference_of(tmp_path / "theirs"))
    assert cell_of(tables, "baseline", "Baseline", "steady_samples_per_second").compared.within
    assert any("of a CPU" in line for line in summary)


# own, reference, on GPUs, on a CPU; the words
BESIDE = {
    "a count": ("steps_per_epoch", 126, 125, False, False, "+0.8 % of 125"),
    "the same count": ("steps_per_epoch", 125, 125, True, True, "equal"),
    "a loss, near": ("train_loss", 7.2, 7.1, True, True, "+1.4 % of 7.1"),
    "a loss, far": ("eval_loss_2", 7.3, 7.1, False, False, "+2.8 % of 7.1"),
    "a peak, near": ("peak_gpu", 960, 1000, True, True, "-4.0 % of 1000.0"),
    "a peak, far": ("peak_cpu", 940, 1000, False, False, "-6.0 % of 1000.0"),
    "a mean over time": ("mean_cpu", 880, 1000, False, True, "-12 % of 1000.0"),
    "a short time": ("eval_samples_per_second", 80, 100, True, True, "-20 % of 100"),
    "scores": ("f1", 14, 10, True, True, "+4.0 points from 10"),
    "a score of 0": ("exact_match", 6, 0, False, False, "+6.0 points from 0"),
    "padding": ("padding", 12, 10, False, False, "+2.0 points from 10"),
    "MFU": ("mfu", 34, 30, False, True, "+13 % of 30"),
    "ten times": ("runtime", 1100, 100, False, False, "reference 100"),
    "from nothing": ("runtime", 1, 0, False, False, "reference 0"),
    "not a number": ("train_loss", float("nan"), 7.1, False, False, "reference 7.1"),
    # of 60 % saved 40 % are left, of which 1.5 x 5 % are 3 points
    "a saving, near": ("saving.peak_gpu", 62, 60, True, True, "+2.0 points from 60"),
    "a saving, far": ("saving.peak_gpu", 64, 60, False, False, "+4.0 points from 60"),
    # three times as long is +200 %; 15 % of 300 % are 45 points
    "a change, near": ("change.runtime", 240, 200, True, True, "+40.0 points from 200"),
    "a change, far": ("change.runtime", 260, 200, False, True, "+60.0 points from 200"),
    "an efficiency, near": ("efficiency.samples_per_second", 70, 80, True, True, "-10.0 points from 80"),
    "an efficiency, far": ("weak_efficiency.runtime", 64, 80, False, True, "-16.0 points from 80"),
    "a factor": ("speedup.runtime", 1.8, 2, True, True, "-10 % of 2"),
    "of the base": ("reference.peak_gpu", 1060, 1000, False, False, "+6.0 % of 1000.0"),
}


@pytest.mark.parametrize(("column", "own", "other", "on_gpus", "on_cpu", "words"), BESIDE.values(), ids=BESIDE)
def test_bands(column, own, other, on_gpus, on_cpu, words):
    for cpu, within in ((False, on_gpus), (True, on_cpu)):
        assert beside(column, Cell(own), Number(value=other), cpu) == Compared(words, within)


def test_what_has_no_band_or_no_number_is_not_compared():
    assert beside("low_gpu", Cell(3), Number(value=400), False) is None
    assert beside("model", Cell("bloom"), Number(value=1), False) is None
    assert beside("train_loss", Cell(None, "no log"), Number(value=7), False) is None


def test_every_column_has_a_band():
    assert BANDS.keys() | NOT_COMPARED == METRICS.keys(), "give each new metric a band in reporting/reference.py"
    assert not BANDS.keys() & NOT_COMPARED
    assert RELATIONS.keys() >= reference.RATIOS.keys()


def test_repeats_of_the_reference_widen_its_band(tmp_path):
    """Rates 8, 10 and 12 of the reference: their deviation is 2, so that three of it are 6."""
    for job, rate in enumerate((8, 10, 12), 1):
        add_run(tmp_path / "theirs", "baseline", str(job), hardware=V100, train__samples_per_second=rate)
    theirs = reference_of(tmp_path / "theirs", all_runs=True)
    for job, (rate, within) in enumerate(((15.5, True), (16.5, False)), 1):
        own = tmp_path / f"own{job}"
        add_run(own, "baseline", "9", hardware=V100, train__samples_per_second=rate)
        tables, _ = compared(own, theirs)
        found = cell_of(tables, "baseline", "Baseline", "samples_per_second").compared
        assert found.within == within and found.text.endswith("% of 10")


def unit(number: float, band: reference.Band) -> str:
    return "%" if not band.points else "point" if number == 1 else "points"


def test_docs_say_the_bands():
    text = (REPOSITORY / "docs" / "results.md").read_text().split("## Against a reference")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| [A-Z].*?\| (exact|[\d.]+ (?:%|points?)) \| (exact|[\d.]+ (?:%|points?)) \|", text, re.MULTILINE
    )
    bands = dict.fromkeys(BANDS.values())
    shown = [tuple(f"{n:g} {unit(n, b)}" if n else "exact" for n in (b.gpu, b.cpu)) for b in bands]
    assert sorted(rows) == sorted(shown)


# --- settings, failed runs, rows of one side


def test_settings_that_differ_are_named_as_the_cause(two):
    own, theirs = two(gpus=True)
    bf16 = {"settings__bf16": True, "settings__fp16": False, "knobs__precision": {"effective": "bf16"}}
    change(theirs, BASELINE, **bf16)
    changes = {"settings__bf16": False, "settings__fp16": True, "knobs__precision": {"effective": "fp16"}}
    changes |= {"settings__learning_rate": 5e-5, "hardware__gpu": "NVIDIA H100 80GB HBM3"}
    change(own, BASELINE, **changes, train__samples_per_second=lambda rate: rate * 2)
    tables, summary = compared(own, reference_of(theirs))
    row = row_of(tables, "baseline", "Baseline")
    assert of_reference(row) == [
        "differs from the reference: hardware NVIDIA H100 80GB HBM3 instead of Tesla V100-SXM2-32GB; "
        "precision fp16 instead of bf16; learning_rate 5e-05 instead of 0.002",
        "outside the bands of the reference: Training Speed (samples/sec) +100 % of 6.274",
    ]
    cells = [cell.compared for cell in row.cells if cell.compared]
    assert [c for c in cells if not c.within] == [
        Compared("+100 % of 6.274 (hardware, precision and 1 more differ)", False)
    ]
    assert {c.text for c in cells if c.within} == {"equal"}
    assert not of_reference(row_of(tables, STAGES, "Stage 1"))
    assert "1 outside in 1 row, 1 row not compared." in summary[0]


@pytest.mark.parametrize(("changed", "remark"), [
    ({"world_size": 2}, "ranks 2 instead of 1"),
    ({"nodes": ["a", "b"]}, "nodes 2 instead of 1"),
    ({"hardware__cpus": 64}, "CPU cores 64 instead of 2"),
    ({"git__dirty": True}, "commit 82e46aa937 with changes instead of 82e46aa937"),
    ({"settings__surprise": "x" * 200}, f"surprise {'x' * 80}... instead of unset"),
    ({"settings__labels": None}, "labels unset instead of sequence"),
])  # fmt: skip
def test_each_setting_that_differs_is_named(two, changed, remark):
    own, theirs = two()
    change(own, BASELINE, **changed) if "settings__surprise" not in changed else add_setting(own, changed)
    tables, _ = compared(own, reference_of(theirs))
    assert f"differs from the reference: {remark}" in row_of(tables, "baseline", "Baseline").remarks


def add_setting(top: Path, changed: dict) -> None:
    change(top, BASELINE, settings=lambda settings: settings | {"surprise": changed["settings__surprise"]})


ENDED = {
    "here": ("oom", "completed", "the reference completed (job 102), this run did not: oom"),
    "there": ("completed", "oom", "the reference did not complete (job 102): oom; this run completed"),
    "both": ("failed", "oom", "the reference did not complete (job 102): oom; this run: failed"),
}


@pytest.mark.parametrize(("own_status", "their_status", "remark"), ENDED.values(), ids=ENDED)
def test_failed_run(two, own_status, their_status, remark):
    own, theirs = two()
    for top, status in ((own, own_status), (theirs, their_status)):
        change(top, STAGE_1, status=status)
    tables, summary = compared(own, reference_of(theirs))
    row = row_of(tables, STAGES, "Stage 1")
    assert of_reference(row) == [remark]
    assert not any(cell.compared for cell in row.cells), "numbers of a run that ended early compare with nothing"
    left_out = [line for line in summary if "Stage 1" in line]
    where = {"oom completed": "here", "completed oom": "in the reference"}
    side = where.get(f"{own_status} {their_status}", "here and in the reference")
    assert len(left_out) == 1 and left_out[0].startswith(f"Not compared, not completed {side}: {STAGES} (Stage 1")


def test_rows_and_tables_of_one_side_are_named(two):
    own, theirs = two()
    shutil.rmtree(own / "experiments" / "fsdp-multi-gpu")
    shutil.rmtree(own / "experiments" / "deepspeed-single-gpu" / "zero_1")
    shutil.rmtree(theirs / "experiments" / "fsdp-baseline")
    folder = reference_of(theirs)
    stored = json.loads((folder / "report.json").read_text())
    stored["tables"]["of-another-tables-yaml"] = stored["tables"]["baseline"]
    (folder / "report.json").write_text(json.dumps(stored))
    _, summary = compared(own, folder)
    assert summary[0].endswith("5 rows not compared.")
    assert summary[2:] == [
        f"Not compared, only in the reference: {STAGES} (Stage 1), fsdp-multi-gpu (Single node, 2 GPUs), "
        "of-another-tables-yaml (Baseline).",
        f"Not compared, not completed here and in the reference: {STAGES} (Stage 3).",
        "Not compared, only here: fsdp-baseline (Baseline).",
    ]


def test_row_of_another_label_is_another_row(two):
    own, theirs = two()
    folder = reference_of(theirs)
    text = (folder / "report.json").read_text().replace('"Stage 1"', '"ZeRO-1"')
    (folder / "report.json").write_text(text)
    _, summary = compared(own, folder)
    assert f"Not compared, only here: {STAGES} (Stage 1)." in summary
    assert f"Not compared, only in the reference: {STAGES} (ZeRO-1)." in summary


def test_another_model_has_a_table_of_its_own(tmp_path):
    add_run(tmp_path / "own", "deepspeed-single-gpu/zero_1", "1", settings__model_name="bigscience/bloom-560m")
    add_run(tmp_path / "theirs", "deepspeed-single-gpu/zero_1", "1")
    _, summary = compared(tmp_path / "own", reference_of(tmp_path / "theirs"))
    assert "0 numbers within, 0 outside, 2 rows not compared." in summary[0]
    assert "Not compared, only here: zero-stages-bloom-560m (Stage 1)." in summary


# --- the file


def text_with(**changes: object) -> str:
    entry = {"label": "Baseline", "experiment": "baseline", "job_id": "1", "status": "completed", "gpus": 0}
    entry |= {"settings": {}, "values": {"train_loss": {"value": 7.1}}} | changes
    return json.dumps({"schema": 1, "tables": {"baseline": [entry]}})


NO_REPORT = "is no report.json of schema 1 ("
DAMAGED = {
    "empty": ("", NO_REPORT),
    "cut": (text_with()[:-30], NO_REPORT),
    "list": ("[]", f"{NO_REPORT}Input should be an object"),
    "run record": ('{"schema": 1, "status": "completed"}', f"{NO_REPORT}tables: Field required"),
    "another schema": (text_with().replace('"schema": 1', '"schema": 2'), f"{NO_REPORT}schema: Input should be 1"),
    "no schema": (text_with().replace('"schema": 1, ', ""), f"{NO_REPORT}schema: Field required"),
    "text as a number": (text_with(values={"f1": {"value": "7"}}), f"{NO_REPORT}tables.baseline.0.values.f1.value: "),
    "NaN": (text_with(values={"f1": {"value": float("nan")}}), f"{NO_REPORT}tables.baseline.0.values.f1.value: "),
    "infinite": (text_with().replace("7.1", "1e999"), f"{NO_REPORT}tables.baseline.0.values.train_loss.value: "),
    "5000 digits": (text_with().replace("7.1", "9" * 5000), NO_REPORT),
    "true": (text_with(values={"f1": {"value": True}}), f"{NO_REPORT}tables.baseline.0.values.f1.value: "),
    "number as a text": (text_with(label=5), f"{NO_REPORT}tables.baseline.0.label: "),
    "null": (text_with(settings=None), f"{NO_REPORT}tables.baseline.0.settings: "),
    "half a character": (text_with(label="\ud800"), NO_REPORT),
    "deep": ("[" * 100_000, NO_REPORT),
    "no text": (b"\xff\xfe\x00", NO_REPORT),
    "many mistakes": ('{"schema": 1, "tables": {"a": [' + "1," * 1_000_000 + "1]}}", f"{NO_REPORT}tables.a.0: "),
    "huge": (text_with() + " " * reference.LARGEST_REFERENCE, "is larger than 4,194,304 bytes"),
}


def test_of_many_mistakes_one_is_kept():
    """A list of all of them would take many times the memory of the file."""
    with pytest.raises(ValidationError) as raised:
        Report.model_validate_json(DAMAGED["many mistakes"][0])
    assert raised.value.error_count() == 1


WAY_OUT = "; give the folder of a report that scripts/report.py of this repository has written"


@pytest.mark.parametrize(("content", "what"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_one_line(content, what, tmp_path, main_of, refusal, capsys):
    path = tmp_path / "theirs" / "report.json"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refusal(main_of, report, RUNS, "-o", tmp_path / "own", "--reference", path.parent)
    assert line.startswith(f"error: {path}: {what}") and line.endswith(WAY_OUT)
    assert not (tmp_path / "own").exists()
    assert capsys.readouterr() == ("", "")


def test_what_is_no_file_is_one_line(tmp_path, main_of, refusal):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "report.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "nowhere": "nowhere: No such file or directory",
        "empty": "empty/report.json: No such file or directory",
        "odd": "odd/report.json: not a regular file",
        "pipe": "pipe: not a regular file",
        "x" * 300: f"{'x' * 300}: File name too long",
    }
    for name, what in expected.items():
        line = refusal(main_of, report, RUNS, "-o", tmp_path / "own", "--reference", tmp_path / name)
        assert line == f"error: {tmp_path}/{what}{WAY_OUT}"
    assert not (tmp_path / "own").exists()


def test_a_report_is_no_reference_for_itself(tmp_path, main_of, refusal):
    written = tmp_path / "report"
    main_of(report, RUNS / "experiments" / "baseline", "-o", written)
    before = {path: path.read_bytes() for path in written.iterdir()}
    (tmp_path / "link").symlink_to(written)
    for same in (written, tmp_path / "link", written / "report.json"):
        line = refusal(main_of, report, RUNS, "-o", written, "--reference", same)
        assert line == f"error: {same}: is the folder that this report is written to; give another folder with -o"
    assert {path: path.read_bytes() for path in written.iterdir()} == before


def test_one_run_has_no_reference(main_of, refusal):
    line = refusal(main_of, report, "--job", RUNS / "experiments" / BASELINE, "--reference", "theirs")
    assert line == "error: --reference: compares whole reports, and --job shows one run; leave one of them out"


def test_report_that_was_cut_off_leaves_no_reference(tmp_path, main_of, refusal, monkeypatch):
    """Not even that of the report before, which its tables no longer agree with."""
    main_of(report, RUNS / "experiments" / "baseline", "-o", tmp_path / "report")

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "page", full)
    refusal(main_of, report, RUNS / "experiments" / "baseline", "-o", tmp_path / "report")
    assert not (tmp_path / "report" / "report.json").exists()


def test_report_of_odd_runs_can_be_a_reference(tmp_path, two):
    """A file's name that is no text, a loss that is no number, a setting of many characters."""
    own, theirs = two()
    change(theirs, BASELINE, train__loss_mean=float("nan"), settings__labels="\x1b[2J" + "y" * 9000, job_id=None)
    path = theirs / "experiments" / BASELINE
    path.rename(os.fsdecode(os.fsencode(path.parent) + b"/\xff.json"))
    tables, _ = compared(own, reference_of(theirs))
    row = row_of(tables, "baseline", "Baseline")
    assert row.cells[0].compared is None and row.cells[1].compared == Compared("equal", True)
    (remark,) = of_reference(row)
    assert remark.isprintable() and len(remark) < 200


EVIL = "=cmd|'/c calc'!A1 <script>alert(1)</script> ![x](http://evil) `id`"


def test_nothing_of_a_reference_acts(tmp_path, main_of, capsys):
    theirs = reference_of(copy_of_the_runs(tmp_path / "theirs"))
    path = theirs / "report.json"
    stored = json.loads(path.read_text())
    entry = stored["tables"]["baseline"][0]
    entry["settings"] = {EVIL: EVIL, "precision": f"{EVIL}\x1b[2J\n"}
    entry["values"]["samples_per_second"]["value"] = 999
    stored["tables"][EVIL] = [entry | {"label": f"{EVIL}\n"}]
    stored["tables"][STAGES][0] |= {"status": EVIL, "job_id": EVIL}
    path.write_text(json.dumps(stored))
    main_of(report, RUNS, "-o", tmp_path / "own", "--reference", theirs)
    out = capsys.readouterr().out
    assert EVIL in out and out.replace("\n", "").isprintable() and len(out.splitlines()) == 7
    page = (tmp_path / "own" / "index.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    text = (tmp_path / "own" / "baseline.md").read_text()
    assert "\\<script>" in text and not re.search(r"(?<!\\)(<script|`id|\[x\])", text) and "\x1b" not in text


def test_numbers_are_in_the_file_with_their_repeats(tmp_path):
    for job, rate in enumerate((8, 10, 12), 1):
        add_run(tmp_path, "baseline", str(job), gpu_log(100, 900), train__samples_per_second=rate)
    stored = json.loads((reference_of(tmp_path, all_runs=True) / "report.json").read_text())
    (entry,) = stored["tables"]["baseline"]
    assert entry["values"]["samples_per_second"] == {"value": 10, "spread": 2, "count": 3}
    assert entry["job_id"] == "3" and entry["settings"]["hardware"] == "AMD EPYC"
    assert stored["tables"].keys() == {"baseline", "gpu-memory", "predicted-memory"}, (
        "a table without a run, or that of all runs"
    )
