"""A report compared with a reference: numbers, different settings, unmatched rows, and files that are not a report."""

import json
from pathlib import Path

import pytest

import report
from report_files import RUNS, add_run, cell
from reporting.definitions import load_definitions
from reporting.metrics import Cell
from reporting.reference import compare, describe_difference, read_reference, write_numbers
from reporting.runs import find_runs
from reporting.tables import Table, build_tables

STAGE_RUNS = RUNS / "experiments" / "deepspeed-single-gpu"
STAGES = "zero-stages-tiny-bloom"
STAGE = "deepspeed-single-gpu/zero_1"


def find_tables(top: Path, all_runs: bool = False) -> list[Table]:
    return build_tables(load_definitions(), find_runs([top]), all_runs)


def write_reference(top: Path, all_runs: bool = False) -> Path:
    """Create the report.json of these runs and return its folder."""
    (top / "reference").mkdir()
    write_numbers(find_tables(top, all_runs), top / "reference")
    return top / "reference"


def compare_folders(own: Path, other: Path) -> tuple[dict[str, Table], str]:
    """Compare the runs in `own` with the reference in `other`. Return the tables by id, and the summary."""
    tables = find_tables(own)
    line = compare(tables, read_reference(other, own / "report"), other)
    return {table.definition.id: table for table in tables}, line


def test_a_report_equals_a_copy_of_itself(tmp_path, main_of, capsys):
    main_of(report, STAGE_RUNS, "-o", tmp_path / "theirs")
    main_of(report, STAGE_RUNS, "-o", tmp_path / "own", "--reference", tmp_path / "theirs")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"Against the reference {tmp_path}/theirs: 41 numbers compared, in 7 of its 8 rows."
    page = (tmp_path / "own" / "index.html").read_text()
    assert line in page and "</a><small>equal</small></td>" in page
    assert (tmp_path / "own" / "report.json").read_text() == (tmp_path / "theirs" / "report.json").read_text()
    main_of(report, STAGE_RUNS, "-o", tmp_path / "own", "--reference", tmp_path / "theirs" / "report.json")
    assert "report.json: 41 numbers compared, in 7 of its 8 rows." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "other", "points", "words"),
    [
        (7.2, 7.1, False, "+1.4 % of 7.1"),
        (880, 1000.0, False, "-12.0 % of 1,000"),
        (125, 125, False, "equal"),
        (14, 10, True, "+4.0 points from 10"),
        (1, 0, False, "reference 0"),
    ],
)
def test_differences_are_described_in_words(own, other, points, words):
    assert describe_difference(Cell(own), other, points) == words


def test_a_row_shows_the_references_number_and_different_settings(tmp_path):
    for top, changes in (("theirs", {}), ("own", {"world_size": 2, "git__dirty": True, "settings__labels": "all"})):
        rate = {"train__steady_samples_per_second": 10.0 if top == "theirs" else 12.0}
        add_run(tmp_path / top, STAGE, "1", **changes, **rate)
    tables, _ = compare_folders(tmp_path / "own", write_reference(tmp_path / "theirs"))
    found = cell(tables[STAGES], "Stage 1", "steady_samples_per_second")
    assert (found.value, found.versus) == (12, "+20.0 % of 10"), "the value is still that of the own run"
    assert tables[STAGES].rows[1].remarks == [
        "differs from the reference: ranks 2 instead of 1; labels all instead of sequence; "
        "commit 82e46aa937 with changes instead of 82e46aa937"
    ]


def test_only_rows_that_completed_on_both_sides_are_compared(tmp_path):
    add_run(tmp_path / "own", STAGE, "1", status="oom", exit_code=1)
    add_run(tmp_path / "theirs", STAGE, "7")
    add_run(tmp_path / "own", "fsdp-baseline", "2")
    add_run(tmp_path / "theirs", "custom-model/single_node", "8")
    tables, line = compare_folders(tmp_path / "own", write_reference(tmp_path / "theirs"))
    assert line.endswith(": 0 numbers compared, in 0 of its 5 rows.")
    assert "the reference (job 7): completed; this run: oom" in tables[STAGES].rows[1].remarks


def test_the_file_has_the_numbers_with_their_repeats(tmp_path):
    for job, rate in enumerate((8, 10, 12), 1):
        add_run(tmp_path, "baseline", str(job), train__samples_per_second=rate)
    stored = json.loads((write_reference(tmp_path, all_runs=True) / "report.json").read_text())
    (entry,) = stored["tables"]["baseline"]
    assert entry["values"]["samples_per_second"] == {"value": 10, "spread": 2, "count": 3}
    assert entry["job_id"] == "3" and entry["settings"]["hardware"] == "AMD EPYC"
    assert stored["tables"].keys() == {"baseline", "gpu-memory", "predicted-memory"}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is not a valid report.json of schema 1 (the file: Invalid JSON: "),
        (
            '{"schema": 1, "status": "completed"}',
            "is not a valid report.json of schema 1 (tables: Field required); give the folder",
        ),
        (
            '{"schema": 2, "tables": {}}',
            "is not a valid report.json of schema 1 (schema: Input should be 1); give the folder",
        ),
        (
            '{"schema": 1, "tables": {"baseline": [{"label": "x"}]}}',
            "is not a valid report.json of schema 1 (tables.baseline.0.",
        ),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_not_a_report_is_one_line(content, what, tmp_path, main_of, refusal):
    path = tmp_path / "theirs" / "report.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    line = refusal(main_of, report, RUNS, "-o", tmp_path / "own", "--reference", path.parent)
    assert line.startswith(f"error: {path}: {what}")
    assert not (tmp_path / "own").exists()


def test_a_report_cannot_be_its_own_reference(tmp_path, main_of, refusal):
    main_of(report, RUNS / "experiments" / "baseline", "-o", tmp_path / "report")
    line = refusal(main_of, report, RUNS, "-o", tmp_path / "report", "--reference", tmp_path / "report")
    assert line.endswith("/report: is the folder that this report is written to; give another folder with -o")
