"""Runs in the report that failed, cannot be compared, were repeated, or have damaged records and logs."""

import json
import os
import shutil
from pathlib import Path

import pytest

from config import CUSTOM_SIZES, DEFAULTS, FLAGS
from report_files import (
    CPU_HEADER,
    GPU_HEADER,
    RUNS_OF_1_0_0,
    SAMPLE,
    add_run,
    cell,
    cpu_log,
    find_run,
    gpu_log,
    table,
    write,
)
from reporting.metrics import Cell, decimals, metric_value
from reporting.report_folder import write_report
from reporting.runs import Missing, find_runs
from reporting.tables import traits
from reporting.trainer_log import entries, find_log, last_step, log_end, read_summary

STAGE = "deepspeed-single-gpu/zero_1"
TABLE = "zero-stages-tiny-bloom"
SCALING = "deepspeed-multi-gpu"
RECORDED = json.loads(SAMPLE.read_text())["settings"]


def stage_1(top: Path, all_runs: bool = False):
    return next(row for row in table(top, TABLE, all_runs).rows if row.label == "Stage 1")


def steady_rate(top: Path, all_runs: bool = False) -> Cell:
    return cell(table(top, TABLE, all_runs), "Stage 1", "steady_samples_per_second")


@pytest.mark.promise("the report reads records and logs of version 1.0.0")
def test_a_record_and_logs_of_version_1_0_0_are_read():
    """Each field of this demo run is still described, and its table has no empty cell."""
    run = find_run(RUNS_OF_1_0_0)
    record = run.record
    assert (run.experiment, run.outcome, run.problems) == ("demo/zero3", "completed", [])
    assert (record.version, record.versions["workshop"]) == (1, "1.0.0")
    parts = [record, record.train, record.hardware, record.git, *record.eval, *record.held, *record.knobs.values()]
    assert [part.model_extra for part in parts] == [{}] * len(parts)
    shown = table(RUNS_OF_1_0_0, "demo")
    values = {name: cell(shown, "ZeRO-3, 2 ranks", name).value for name in shown.definition.columns}
    assert values == pytest.approx(
        {
            "train_loss": 7.557864983876546,
            "eval_loss": 7.522170761084815,
            "held_parameters": 462592 / 2**20,
            "estimated_parameters": 462592 / 2**20,
            "held_gradients": 462592 / 2**20,
            "estimated_gradients": 462592 / 2**20,
            "held_optimizer_state": 1387780 / 2**20,
            "estimated_optimizer_state": 1387776 / 2**20,
            "steady_samples_per_second": 27.497,
            "peak_process": 594.4,
        }
    )
    assert metric_value("estimated_cpu", run) > 2 * 433
    log = find_log(run.folder, run.job_id)
    assert read_summary(log_end(log)) == ("completed", "0")
    assert [entry["loss"] for entry in entries(log) if "loss" in entry] == [7.572, 7.485]
    assert last_step(log_end(log)) == "step 6 of 6, loss 7.485"


# --- which run a row shows


def test_a_row_shows_the_latest_completed_run(tmp_path):
    add_run(tmp_path, STAGE, "1")
    add_run(tmp_path, STAGE, "2", train__steady_samples_per_second=99.0)
    add_run(tmp_path, STAGE, "3", status="oom", exit_code=1, train=None)
    row = stage_1(tmp_path)
    assert (row.run.job_id, row.status, steady_rate(tmp_path).value) == ("2", "completed", 99.0)
    assert row.remarks == ["the newer job 3 is not shown: its status is oom"]


@pytest.mark.parametrize("left", ["results/9.json", "log/zero_1_9.out"])
def test_a_newer_job_without_a_record_is_named(tmp_path, left):
    """Job 9 has a damaged record, or only a log. The time of this file counts as the time when the job ran."""
    folder = add_run(tmp_path, STAGE, "1", started="2026-11-10T10:00:00+00:00")
    write(folder / left, "error: --fp16: needs a GPU; leave it out\n")
    os.utime(folder / left, (2e9, 2e9))
    assert stage_1(tmp_path).remarks == ["the newer job 9 is not shown: its status is incomplete"]


def test_a_row_shows_the_latest_run_that_compares(tmp_path):
    """A newer run with other settings does not replace a run that can be compared with the other rows."""
    for job, name in enumerate(("zero_1", "zero_2", "zero_3", "zero_1"), 1):
        add_run(
            tmp_path, f"deepspeed-single-gpu/{name}", str(job), settings__num_train_epochs=60.0 if job == 4 else 3.0
        )
    row = stage_1(tmp_path)
    assert (row.jobs, row.status) == ("1", "completed")
    assert row.remarks == ["the newer job 4 is not shown: it is not comparable: num_train_epochs 60, others 3"]


def test_a_row_shows_the_latest_run_if_all_were_repeated(tmp_path):
    for job in range(1, 5):
        add_run(tmp_path, f"deepspeed-single-gpu/zero_{1 + job % 2}", str(job), git__commit=str(job > 2) * 10)
    assert [row.jobs for row in table(tmp_path, TABLE).rows if row.run] == ["4", "3"]


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "stopped"])
def test_a_run_that_did_not_complete_is_a_row_with_its_status(tmp_path, status):
    add_run(tmp_path, STAGE, "1", status=status, exit_code=9, train=None)
    row = stage_1(tmp_path)
    no_checkpoint = "; no checkpoint was saved at its end" if status in ("stopped", "timeout") else ""
    assert row.status == status and row.remarks == [f"{status}: exit code 9{no_checkpoint}"]
    assert (row.cells[0].value, steady_rate(tmp_path)) == (900, Cell(None, f"the run's status is {status}"))


RESTART = {"time": "2026-11-20T10:00:20+00:00", "reason": "node failure", "step": 4}
STOP = {"signal": "SIGTERM", "step": 120, "checkpoint": "output/1/checkpoint-120"}


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({"attempt": 1, "restarts": []}, "completed"),
        (
            {"status": "stopped", "exit_code": 75, "stop": STOP},
            "stopped: SIGTERM at step 120; resume with --resume_from_checkpoint output/1/checkpoint-120",
        ),
        (
            {"status": "failed", "exit_code": 137, "stop": STOP},
            "failed: SIGTERM at step 120; resume with --resume_from_checkpoint output/1/checkpoint-120",
        ),
        (
            {"status": "failed", "exit_code": 137, "reason": "rank 1 on node2 ended first, with exit code 137"},
            "failed: rank 1 on node2 ended first, with exit code 137",
        ),
        (
            {"status": "failed", "exit_code": None},
            "failed: ended without a word: its node failed, or it was killed",
        ),
        ({"attempt": 2, "restarts": [RESTART]}, "completed: attempt 2, resumed at step 4"),
        (
            {"attempt": 2, "resumed_from": "output/7/checkpoint-8"},
            "completed: attempt 2, resumed from output/7/checkpoint-8",
        ),
        ({"attempt": 2, "restarts": [RESTART | {"step": 0}]}, "completed: attempt 2, from step 0"),
        ({"attempt": 2, "restarts": [RESTART], "status": "oom", "exit_code": 1},
         "oom: exit code 1; attempt 2, resumed at step 4"),
        ({"resumed_from": "output/7/checkpoint-8"}, "completed: resumed from output/7/checkpoint-8"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_described(tmp_path, changes, ended):
    add_run(tmp_path, STAGE, "1", **changes)
    assert find_run(tmp_path).outcome == ended
    assert stage_1(tmp_path).remarks == ([ended.removeprefix("completed: ")] if ended != "completed" else [])


def test_a_checkpoint_that_another_run_resumed_from_is_not_offered(tmp_path):
    add_run(tmp_path, STAGE, "1", status="stopped", exit_code=75, stop=STOP)
    add_run(tmp_path, STAGE, "2", resumed_from=STOP["checkpoint"])
    assert [run.outcome for run in find_runs([tmp_path])] == [
        "stopped: SIGTERM at step 120",
        f"completed: resumed from {STOP['checkpoint']}",
    ]


# Rank 1 begins its traceback before rank 0. Python prints no line `Traceback` for the program that it cannot compile
MIXED = """[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank0]:   File "scripts/train.py", line 24, in <module>
[rank1]:   File "scripts/train.py", line 24, in <module>
[rank0]: ValueError: mode 0
step 3 of 4
[rank1]: ValueError: mode 1
srun: error: node1: task 0: Exited with exit code 1
"""
SYNTAX = '  File "scripts/train.py", line 24\n    def (\n        ^\nSyntaxError: invalid syntax\nsrun: error: node1\n'


HANG = "no answer from rank 1 on node2"


@pytest.mark.parametrize(
    ("log", "reason", "shown"),
    [
        ("error: first\nerror: test: 0.1 GB/s; look at it\n", None, "exit code 3; error: test: 0.1 GB/s; look at it"),
        (MIXED, None, "exit code 3; ValueError: mode 1"),
        (SYNTAX, None, "exit code 3; SyntaxError: invalid syntax"),
        # The watchdog writes its reason both into the record and into the log
        (f"error: hang: {HANG}; look at that process\n", HANG, f"error: hang: {HANG}; look at that process"),
    ],
    ids=["error line", "tracebacks", "syntax", "once"],
)
def test_failed_run_shows_its_error_line_or_its_exception(tmp_path, log, reason, shown):
    folder = add_run(tmp_path, STAGE, "1", status="failed", exit_code=3, reason=reason)
    write(folder / "log" / "zero_1_1.out", log)
    assert find_run(tmp_path).outcome == f"failed: {shown}"


def test_jobs_without_a_record_are_runs(tmp_path, monkeypatch):
    """Job 77 was refused, job 78 waits, and job 80 left only a memory log. my_job continued after an error line."""
    monkeypatch.setattr("job.end_of_job.queued_jobs", lambda: ["78"])
    folder = tmp_path / "experiments" / STAGE
    write(folder / "log" / "zero_1_77.out", "start\nerror: --fp16: needs a GPU; leave it out\nTraceback\n")
    write(folder / "log" / "zero_1_78.out", "waiting\n")
    write(folder / "gpu_memory" / "gpu_memory_log_80_node1.csv", gpu_log(100, 900))
    add_run(tmp_path, STAGE, "my_job", started="2020-01-01T00:00:00+00:00")
    write(folder / "log" / "zero_1_my_job.out", "error: a line of a job that continued\n")
    for age, path in enumerate(
        (folder / "gpu_memory" / "gpu_memory_log_80_node1.csv", folder / "log" / "zero_1_77.out")
    ):
        os.utime(path, (2e9 - age, 2e9 - age))
    completed, refused, logged = find_runs([tmp_path, tmp_path / "experiments"])
    assert (refused.job_id, refused.status, refused.experiment) == ("77", "incomplete", STAGE)
    assert refused.problems == [f"{folder}/log/zero_1_77.out: error: --fp16: needs a GPU; leave it out"]
    assert refused.gpu == Missing("the job ended before its training began")
    assert refused.gpu_hours() == Missing("no readable run record")
    assert (logged.job_id, logged.status, logged.gpu.peak) == ("80", "incomplete", 900)
    assert "no run record" in logged.problems[0]
    assert (completed.job_id, completed.problems) == ("my_job", [])


TRACEBACK = """Traceback (most recent call last):
  File "scripts/train.py", line 24, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
srun: error: node1: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-11-20T10:00:00 ***
"""
LAST = "ModuleNotFoundError: No module named 'torch'"


def test_a_job_with_only_a_log_is_shown_with_its_exception_or_its_last_lines(tmp_path, monkeypatch):
    """Jobs 1 and 2 have a broken environment, and job 3 has a wrong path. Job 4 still runs. Job 5 does not train."""
    monkeypatch.setattr("job.end_of_job.queued_jobs", lambda: ["4"])
    folder = tmp_path / "experiments" / STAGE
    summary = f"\n{'=' * 60}\nstatus: {{}} (exit code {{}})\n{'=' * 60}\n"
    source = "slurm_script: line 9: ../../job.sh: No such file or directory"
    logs = [TRACEBACK, TRACEBACK + summary.format("failed", 1), source, TRACEBACK, summary.format("completed", 0)]
    for job, log in enumerate(logs, 1):
        write(folder / "log" / f"zero_1_{job}.out", log)
    runs = sorted(find_runs([tmp_path]), key=lambda run: run.job_id)
    assert [run.problems for run in runs] == [
        [f"{folder}/log/zero_1_{job}.out: no run record; the end of the log: {end}"]
        for job, end in enumerate((LAST, LAST, source), 1)
    ]
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    assert "No module named 'torch'" in (tmp_path / "report" / "runs.md").read_text()


def test_a_job_whose_first_node_failed_is_shown_with_slurms_state(tmp_path, monkeypatch):
    """A rank on the second node has closed the record. The job's folder still exists, because its script was killed."""
    monkeypatch.setattr("job.end_of_job.queued_jobs", lambda: [])
    monkeypatch.setattr("job.end_of_job.ask_slurm", lambda *_: "JobId=1\n   JobState=NODE_FAIL Reason=NodeDown")
    folder = add_run(tmp_path, STAGE, "1", status="failed", exit_code=1)
    assert find_run(tmp_path).outcome == "failed: exit code 1"
    (folder / "results" / ".1").mkdir()
    assert find_run(tmp_path).outcome == "failed: ended without a word: Slurm's state of the job is NODE_FAIL"


def test_a_job_stopped_before_its_record_has_its_status(tmp_path):
    """The first job was stopped in its bandwidth test, and the second job while it loaded its model."""
    folder = tmp_path / "experiments" / STAGE
    for job, status in (("77", "stopped"), ("78", "timeout")):
        write(folder / "log" / f"zero_1_{job}.out", f"start\n======\nstatus: {status} (exit code 143)\n======\n")
    write(folder / "cpu_memory" / "cpu_memory_log_78.txt", cpu_log(100, 900))
    runs = sorted(find_runs([tmp_path]), key=lambda run: run.job_id)
    assert [run.outcome for run in runs] == [
        "stopped: exit code 143; before its training began",
        "timeout: exit code 143; before its training began",
    ]
    assert runs[0].problems == []


@pytest.mark.promise("reliability 15")
@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "the file"),
        ('{"schema": 1,', "the file"),
        ("{}", "status"),
        ('{"status": "completed", "nodes": 5}', "nodes"),
    ],
)
def test_damaged_record_is_an_incomplete_run(tmp_path, content, field):
    """A full disk or another program can damage a record. The other runs keep their rows."""
    path = tmp_path / "experiments" / STAGE / "results" / "7.json"
    write(path, content)
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", started="2020-01-01T00:00:00+00:00")
    good, damaged = find_runs([tmp_path])  # a damaged record has the time of its file
    assert damaged.status == "incomplete" and damaged.problems[0].startswith(
        f"{path}: is not a valid run record ({field}: "
    )
    assert good.completed


# --- comparisons


def test_the_report_compares_what_stands_for_a_flag(tmp_path):
    """The rows of a table are the strategies, which differ."""
    add_run(tmp_path, "baseline", "1")
    (run,) = find_runs([tmp_path])
    assert {knob.compared_as for knob in FLAGS.values()} <= {"", "strategy", *traits(run)}
    assert not {"train_size", "samples_per_gpu", "optim", "fp16", "bf16", "fsdp", "deepspeed"} & {*traits(run)}


def uses_optimizer(name: str) -> dict:
    return {"knobs__optimizer": {"requested": name, "effective": name}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings__labels": "answer"}, "labels answer, others sequence"),
        ({"knobs__precision__effective": "fp32"}, "precision fp32, others bf16"),
        (uses_optimizer("Adafactor (transformers)"), "optimizer Adafactor, others AdamW"),
        ({"settings__lr_scheduler_type": "cosine"}, "lr_scheduler_type cosine, others linear"),
        ({"git__dirty": True}, "commit 82e46aa937 with changes, others 82e46aa937"),
        ({"overrides": ["nodes: 3 instead of 2"]}, "nodes: 3 instead of 2"),
    ],
)
def test_a_run_that_does_not_compare_is_marked(tmp_path, change, said):
    # DeepSpeed's own AdamW is the same algorithm, and a flag that an older record does not have had its default
    now = {f"settings__{flag}": DEFAULTS[flag] for flag in DEFAULTS.keys() - {*RECORDED, *CUSTOM_SIZES}}
    own = {"1": {}, "2": change, "3": uses_optimizer("DeepSpeedCPUAdam (deepspeed)") | now}
    for job, stage in (("1", "zero_1"), ("2", "zero_2"), ("3", "zero_3")):
        add_run(tmp_path, f"deepspeed-single-gpu/{stage}", job, **own[job])
    rows = [row for row in table(tmp_path, TABLE).rows if row.run]
    assert [row.status for row in rows] == ["completed", "completed, not comparable", "completed"]
    assert rows[1].remarks == [f"not comparable: {said}"]
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    page = (tmp_path / "report" / "index.html").read_text()
    overview = page.partition('<div id="overview">')[2].partition("</details>")[0]
    assert overview.count(said) == 1


def test_a_reference_that_does_not_compare_is_marked(tmp_path):
    stages = f"{SCALING}/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "1", settings__labels="all")
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "2")
    (row, *_) = table(tmp_path, "offload-trade-off").rows
    assert row.remarks == ["no offload (job 1): not comparable: labels all, others sequence"]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"settings__num_train_epochs": 1.0}, "num_train_epochs 1 instead of 3"),
        ({"overrides": ["nodes: 3 instead of 2"]}, "nodes: 3 instead of 2"),
    ],
)
def test_a_run_that_does_not_compare_has_no_relations(tmp_path, change, cause):
    """With twice the GPUs, its rate is four times that of the first row. An efficiency of 200 % would be wrong."""
    add_run(tmp_path, f"{SCALING}/2_gpus", "2", world_size=2, train__steady_samples_per_second=10.0)
    add_run(tmp_path, f"{SCALING}/4_gpus", "4", world_size=4, train__steady_samples_per_second=40.0, **change)
    add_run(tmp_path, f"{SCALING}/8_gpus", "8", world_size=8, train__steady_samples_per_second=36.0)
    weak = table(tmp_path, "multi-gpu-weak-scaling")
    column = "efficiency.steady_samples_per_second"
    note = f"not comparable with job 2 ({SCALING}/2_gpus): {cause}"
    assert cell(weak, "4 GPUs", column) == Cell(None, note)
    assert cell(weak, "4 GPUs", "steady_samples_per_second").value == 40
    assert cell(weak, "8 GPUs", column).value == 90


def test_runs_whose_settings_vary_on_purpose_compare(tmp_path):
    for gpus, layers, batch, runtime in ((2, 3, 8, 100), (4, 6, 4, 110)):
        add_run(tmp_path, f"custom-model/weak_scaling/{gpus}_gpus", str(gpus), world_size=gpus,
                settings__num_layers=layers, settings__per_device_train_batch_size=batch,
                settings__per_device_eval_batch_size=batch, train__runtime_s=runtime)  # fmt: skip
    weak = table(tmp_path, "custom-weak-scaling")
    assert cell(weak, "4 GPUs", "weak_efficiency.runtime").value == pytest.approx(100 / 110 * 100)
    assert not any(row.mismatches for row in weak.rows)


def test_mean_and_spread_over_repeats_that_compare(tmp_path):
    for job, rate in (("1", 10.0), ("2", 12.0), ("3", 14.0)):
        add_run(tmp_path, STAGE, job, train__steady_samples_per_second=rate)
    add_run(tmp_path, STAGE, "4", status="failed", exit_code=1)
    add_run(tmp_path, STAGE, "0", settings__labels="answer", train__steady_samples_per_second=99.0)
    row = stage_1(tmp_path, all_runs=True)
    mean = steady_rate(tmp_path, all_runs=True)
    assert mean == Cell(12, "", 2, 3)
    assert mean.with_decimals(1) == "12.0 ± 2.0 (3)"
    assert "job 0 is not in the mean: labels answer instead of sequence" in row.remarks


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([10.1, 18.93, 35.0], ["10.10", "18.93", "35.00"]),
        ([900.0, 1016.4], ["900", "1,016"]),
        ([900.0, 30000.0, None], ["900", "30,000", ""]),
        ([7.443193, 0.05], ["7.443", "0.050"]),
        ([12345.6, 0.00012], ["12,346", "0.00012"]),
        ([2, 901760], ["2", "901,760"]),
        ([0.0], ["0"]),
        ([float("nan"), 2.5], ["nan", "2.5"]),
        (["tiny-bloom"], ["tiny-bloom"]),
    ],
)
def test_digits_agree_within_a_column(values, shown):
    cells = [Cell(value) for value in values]
    assert [each.with_decimals(decimals(cells)) for each in cells] == shown


# --- GPU-hours


def test_gpu_hours_count_all_attempts(tmp_path):
    changes = {"hardware__gpus": 4, "finished": "2026-11-20T10:30:01+00:00"}
    part = RESTART | {"started": "2026-11-20T08:00:00+00:00", "finished": "2026-11-20T08:30:00+00:00"}
    for restarts, hours in (
        ([], 2),
        ([part], 4),
        ([part | {"finished": None}], Missing("the end of a part was not recorded")),
    ):
        add_run(tmp_path, STAGE, "1", **changes, restarts=restarts)
        assert find_run(tmp_path).gpu_hours() == hours
    add_run(tmp_path, STAGE, "1", **changes | {"finished": None})
    assert find_run(tmp_path).gpu_hours() == Missing("the end of the run was not recorded")


# --- memory logs

GOOD = gpu_log(100, 900, 500)
DAMAGED = {  # GPU log, CPU log, GPU peak, CPU peak, problem
    "cut": (GOOD + "2026/11/20 22:00:15.000, 0, Tes", "", 900, 90, "gpu_memory_log_1.csv:5: no sample"),
    "no answer": (
        GOOD.replace(" 500,", " [N/A],").replace("32768", "32768 MiB").replace("Tesla V100-SXM2-32GB", "H100"),
        "",
        900,
        90,
        "no sample (2026/11/20 22:00:10.000, 0, H100, [N/A], 32768 MiB, 71.23, 9)",
    ),
    "only header": (GPU_HEADER, "", None, 90, "gpu_memory_log_1.csv: no sample"),
    "empty": (b"\n", "", None, 90, "gpu_memory_log_1.csv: no sample"),
    "second GPU": (
        gpu_log(1, gpus=2),
        "",
        None,
        90,
        "gpu_memory_log_1.csv: GPU(s) 0, 1 logged, but the job ran on 1",
    ),
    "no CPU log": ("", None, 900, None, "cpu_memory: no log of job 1"),
    "no CPU sample": ("", CPU_HEADER, 900, None, "cpu_memory_log_1.txt: no sample"),
    "too short": ("", cpu_log(10, 90, 50, step=1), 900, 90, "it covers 2 s of a training run of 15 s"),
}


@pytest.mark.parametrize(("gpu", "cpu", "gpu_peak", "cpu_peak", "problem"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_log_is_a_problem(tmp_path, gpu, cpu, gpu_peak, cpu_peak, problem):
    """The valid part of a log is shown. A number is left out if the samples of a whole GPU or node are missing."""
    add_run(tmp_path, STAGE, "1", gpu, cpu)
    row = stage_1(tmp_path)
    assert row.status == "completed, incomplete"
    for memory, peak in ((row.run.gpu, gpu_peak), (row.run.cpu, cpu_peak)):
        assert isinstance(memory, Missing) if peak is None else memory.peak == peak
    assert any(problem in remark for remark in row.remarks), row.remarks


def test_logs_of_a_resumed_run_are_complete(tmp_path):
    """A resumed run appends to its logs after a second header, and may have used other nodes and GPUs before."""
    logs = {"gpu": GOOD + gpu_log(100, 700, 500), "cpu": cpu_log(10, 90, 50) * 2}
    folder = add_run(tmp_path, STAGE, "1", **logs, attempt=2, nodes=["n1"])
    assert (find_run(tmp_path).problems, find_run(tmp_path).gpu.mean) == ([], pytest.approx(2800 / 6))
    write(folder / "gpu_memory" / "gpu_memory_log_1_n2.csv", gpu_log(100, 999, 5, 5, gpus=2, step=10))
    assert (find_run(tmp_path).problems, find_run(tmp_path).gpu.peak) == ([], 999)


@pytest.mark.parametrize("requeued", [{}, {"attempt": 2, "restarts": [RESTART]}])
def test_a_run_that_was_resumed_in_a_new_job_is_complete(tmp_path, requeued):
    """The run's runtime covers all jobs of the training, but its logs cover only its own job."""
    add_run(tmp_path, STAGE, "1", train__runtime_s=500, resumed_from="output/7/checkpoint-8", **requeued)
    assert stage_1(tmp_path).status == "completed"


def test_nodes_are_combined_only_if_all_have_logs(tmp_path):
    folder = add_run(tmp_path, STAGE, "1", gpu=None, nodes=["n1", "n2"], world_size=4)
    write(folder / "gpu_memory" / "gpu_memory_log_1_n1.csv", gpu_log(100, 300, gpus=2))
    assert find_run(tmp_path).gpu == Missing(f"{folder}/gpu_memory: 1 log(s) (n1) for 2 node(s)")
    write(folder / "gpu_memory" / "gpu_memory_log_1_n2.csv", gpu_log(200, 800, gpus=2))
    gpu = find_run(tmp_path).gpu
    assert (gpu.peak, gpu.minimum, gpu.mean) == (800, 100, 350)


def test_memory_of_a_whole_gpu_is_not_shown_for_a_slice(tmp_path):
    add_run(tmp_path, STAGE, "1", hardware__gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    run = find_run(tmp_path)
    assert run.gpu == Missing("the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs")
    assert run.cpu.peak == 90 and not run.problems


def test_the_memory_of_a_gpu_that_ranks_share_is_their_sum(tmp_path):
    add_run(tmp_path, STAGE, "1", world_size=4, hardware__gpus=1)
    run = find_run(tmp_path)
    assert run.gpu.peak == 900 and not run.problems
    assert run.status_notes == ["4 ranks share each GPU, so the GPU log has their sum"]


def test_old_tables_are_removed(tmp_path):
    folder = add_run(tmp_path, STAGE, "1")
    write_report([tmp_path / "experiments"], tmp_path / "report", all_runs=False)
    assert (tmp_path / "report" / f"{TABLE}.csv").exists()
    shutil.rmtree(folder)
    add_run(tmp_path, "baseline", "2")
    write_report([tmp_path / "experiments"], tmp_path / "report", all_runs=False)
    assert not (tmp_path / "report" / f"{TABLE}.csv").exists()
