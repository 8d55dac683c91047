"""The baseline summary: values as recorded, and an empty cell with a reason for each that is missing."""

import json
from pathlib import Path

import pytest

import report
from report import summary_rows
from reporting.record import Record
from reporting.runs import Run

RECORD = {
    "schema": 1,
    "status": "completed",
    "job_id": "7",
    "output_dir": "output/7",
    "missing": {},
    "settings": {"model_name": "tiny-bloom", "em_f1": True},
    "eval_size": 64,
    "steps_per_epoch": 21900,
    "train": {
        "loss_mean": 2.34567,
        "samples_per_second": 12.3456,
        "steady_samples_per_second": 20.5,
        "steady_steps": 9,
    },
    "eval": [{"epoch": epoch, "loss": 3.0 - epoch, "samples_per_second": 40.0 + epoch} for epoch in (1.0, 2.0, 3.0)],
    "exact_match": 0.0,
    "f1": 1.5,
}


def cells(record: dict) -> dict[str, tuple[str, str]]:
    run = Run(Path(), record["job_id"], Record.model_validate_json(json.dumps(record)), record["status"])
    return {name: (value, note) for name, value, note in summary_rows(run)}


def test_values_of_a_completed_run_are_in_the_table():
    table = cells(RECORD)
    assert {name: value for name, (value, _) in table.items()} == {
        "Train Loss (Final)": "2.346",
        "Eval Loss (Epoch 1)": "2",
        "Eval Loss (Epoch 2)": "1",
        "Eval Loss (Epoch 3)": "0",
        "Training Speed (samples/sec)": "12.35",
        "Training Speed, steps alone (samples/sec)": "20.5",
        "Evaluation Speed (samples/sec)": "43",
        "Steps per Epoch": "21900",
        "Exact Match (%)": "0",
        "F1 (%)": "1.5",
    }
    assert table["F1 (%)"][1] == "64 questions"


@pytest.mark.parametrize("status", ["failed", "oom", "running"])
def test_failed_run_has_empty_values_with_the_reason(status):
    began = {key: RECORD[key] for key in ("job_id", "missing", "settings", "eval_size", "output_dir")}
    table = cells(began | {"status": status})
    assert len(table) == 7
    assert set(table.values()) == {("", f"the run's status is {status}")}


def test_failed_run_keeps_what_it_measured():
    table = cells(RECORD | {"status": "failed", "train": None, "eval": RECORD["eval"][:1]})
    assert table["Eval Loss (Epoch 1)"][0] == "2"
    assert table["Train Loss (Final)"] == ("", "the run's status is failed")


def test_rate_that_a_completed_run_could_not_measure_has_its_own_reason():
    train = RECORD["train"] | {"steady_samples_per_second": None, "steady_steps": 0}
    missing = {"train.steady_samples_per_second": "too few steps after the warm-up"}
    table = cells(RECORD | {"train": train, "missing": missing})
    assert table["Training Speed, steps alone (samples/sec)"] == ("", "too few steps after the warm-up")


def test_run_without_em_and_f1_has_no_rows_for_them():
    table = cells(RECORD | {"settings": {"model_name": "m", "em_f1": False}})
    assert not {"Exact Match (%)", "F1 (%)"} & table.keys()


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_report_py_prints_the_table_and_the_paths(status, main_of, capsys, tmp_path):
    path = tmp_path / "my record.json"
    path.write_text(json.dumps(RECORD | {"status": status} | ({} if status == "completed" else {"train": None})))
    main_of(report, "--job", path)
    printed = capsys.readouterr().out
    assert f"Baseline summary of 7 ({status}, tiny-bloom)" in printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["Metric", "Value", "Note"]
    assert ("2.346" in lines[2]) == (status == "completed")
    assert "the run's status is failed" in printed or status == "completed"
    assert printed.splitlines()[-2:] == ["model:      not saved", f"run record: {path}"]


BAD = {
    "missing": (None, "No such file or directory"),
    "no JSON": ('{"status": ', "is no run record ("),
    "something else": ("[1]", "is no run record (Input should be an object)"),
    "another record": ('{"status": "completed"}', "is no run record (settings: Field required)"),
}


@pytest.mark.parametrize(("content", "what"), BAD.values(), ids=BAD)
def test_report_py_refuses_what_is_no_run_record(content, what, main_of, refusal, tmp_path):
    path = tmp_path / "7.json"
    if content:
        path.write_text(content)
    assert refusal(main_of, report, "--job", path).startswith(f"error: {path}: {what}")
