"""What the report does with runs that failed, do not compare, repeat, or left damaged logs."""

import math
import shutil
from pathlib import Path

import pytest

from report import DEFINITIONS, job_tables, write_report
from report_files import CPU_HEADER, GPU_HEADER, add_run, cpu_log, gpu_log, write
from reporting import memory_logs, plots
from reporting.runs import Run, find_runs
from reporting.tables import Table, build_tables, load_definitions

STAGE = "deepspeed-single-gpu/zero_1"
TABLE = "zero-stages-tiny-bloom"


def table(top: Path, name: str = TABLE, all_runs: bool = False) -> Table:
    tables = build_tables(load_definitions(DEFINITIONS), find_runs([top]), all_runs)
    return next(found for found in tables if found.name == name)


def stage_1(top: Path, all_runs: bool = False):
    return next(row for row in table(top, all_runs=all_runs).rows if row.label == "Stage 1")


def only(top: Path) -> Run:
    (run,) = find_runs([top])
    return run


# --- which run a row shows


def test_latest_completed_run(tmp_path):
    add_run(tmp_path, STAGE, "1")
    add_run(tmp_path, STAGE, "2", train__steady_samples_per_second=99.0)
    add_run(tmp_path, STAGE, "3", status="oom", exit_code=1, train=None)
    row = stage_1(tmp_path)
    assert (row.run.job_id, row.status, row.cells[-1].value) == ("2", "completed", 99.0)
    assert row.remarks == ["the newer job 3 is not shown: its status is oom"]


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "stopped"])
def test_run_that_did_not_complete_is_a_row_with_its_status(tmp_path, status):
    add_run(tmp_path, STAGE, "1", status=status, exit_code=9, train=None)
    row = stage_1(tmp_path)
    assert row.status == status and row.remarks == [f"{status}: exit code 9"]
    assert (row.cells[0].value, row.cells[-1].value, row.cells[-1].note) == (900, None, f"the run's status is {status}")


def test_samples_that_are_left_out_are_said_in_row_and_summary(tmp_path):
    """A forked child has all memory of its parent, until its exec: real and virtual."""
    lines = ["0.0 9.0 400 2000", "5.0 9.0 802 4010", "10.0 9.0 402 2010", "15.0 9.0 420 2010"]
    folder = add_run(tmp_path, STAGE, "1", cpu="\n".join([CPU_HEADER, *lines]) + "\n")
    note = "cpu_memory_log_1.txt: 1 sample of 802 MiB left out: a forked child was counted with its parent"
    row = stage_1(tmp_path)
    assert (row.status, row.remarks) == ("completed", [note])
    assert (row.run.cpu.peak, row.run.cpu.minimum) == (420, 400)
    assert plots.curve(row.run, 1, memory_logs.read_cpu_log) == [(0, 400), (10, 402), (15, 420)]
    summary = job_tables(folder / "results" / "1.json").splitlines()
    assert note in summary
    assert any(line.startswith("| CPU memory, peak (MiB)") and "420" in line for line in summary)


def test_jobs_do_not_share_files(tmp_path):
    """Job 1 has no logs, jobs 10 and 1_2 in the same folder do."""
    folder = add_run(tmp_path, STAGE, "1", gpu=None, cpu=None, hardware__gpus=1)
    write(folder / "gpu_memory" / "gpu_memory_log_10.csv", gpu_log(100, 9999))
    run = next(run for run in find_runs([tmp_path]) if run.job_id == "1")
    assert run.gpu.peak is None and run.gpu.reason == f"{folder}/gpu_memory: no log of job 1"


def test_logs_without_a_record_make_an_incomplete_run(tmp_path):
    folder = tmp_path / "experiments" / STAGE
    write(folder / "gpu_memory" / "gpu_memory_log_7.csv", gpu_log(100, 900))
    run = only(tmp_path)
    assert (run.job_id, run.status, run.experiment, run.gpu.peak) == ("7", "incomplete", STAGE, 900)
    assert "no run record" in run.problems[0]


def test_refused_job_shows_the_line_of_its_refusal(tmp_path):
    """It ended before it had a record or a memory log; a job that waits for its GPUs has neither, and is not shown."""
    folder = tmp_path / "experiments" / STAGE
    write(folder / "log" / "zero_1_77.out", "start\nerror: --fp16: needs a GPU; leave it out\nTraceback\n")
    write(folder / "log" / "zero_1_78.out", "waiting\n")
    add_run(tmp_path, STAGE, "79")
    write(folder / "log" / "zero_1_79.out", "error: a line of a job that went on\n")
    refused, completed = find_runs([tmp_path, tmp_path / "experiments"])
    assert (refused.job_id, refused.status) == ("77", "incomplete")
    assert refused.problems == [f"{folder}/log/zero_1_77.out: error: --fp16: needs a GPU; leave it out"]
    assert refused.gpu.reason == "the job ended before its training began"
    assert refused.gpu_hours() == (None, "no run record that can be read")
    assert completed.job_id == "79" and not completed.problems
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    assert "error: --fp16: needs a GPU; leave it out" in (tmp_path / "report" / "index.html").read_text()


def test_failed_run_shows_the_last_error_line(tmp_path):
    folder = add_run(tmp_path, STAGE, "1", status="failed", exit_code=3)
    write(folder / "log" / "zero_1_1.out", "error: first\nerror: bandwidth test: 0.1 GB/s; look at the network\n")
    assert only(tmp_path).status_note == "exit code 3; error: bandwidth test: 0.1 GB/s; look at the network"


@pytest.mark.parametrize("content", ["", '{"schema": 1,', "[1]", "{}", b"\xff\xfe"])
def test_damaged_record_is_an_incomplete_run(tmp_path, content):
    path = tmp_path / "experiments" / STAGE / "results" / "7.json"
    write(path, content)
    run = only(tmp_path)
    assert run.status == "incomplete" and run.problems[0].startswith(f"{path}: is no run record")
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    assert "incomplete" in (tmp_path / "report" / "runs.md").read_text()


# --- comparisons


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings__labels": "answer"}, "labels answer, others sequence"),
        ({"settings__samples_per_gpu": 16}, "data size 16 per GPU, others 128 in all"),
        ({"knobs__precision__effective": "fp32"}, "precision fp32, others bf16"),
        ({"hardware__gpu": "NVIDIA H200"}, "hardware NVIDIA H200, others AMD EPYC"),
        ({"git__commit": "f" * 40}, "commit ffffffffff, others"),
        ({"git__dirty": True}, "with changes, others"),
    ],
)
def test_run_that_does_not_compare_is_marked(tmp_path, change, said):
    for job, stage in (("1", "zero_1"), ("2", "zero_2"), ("3", "zero_3")):
        add_run(tmp_path, f"deepspeed-single-gpu/{stage}", job, **(change if job == "2" else {}))
    remarks = {row.label: row.remarks for row in table(tmp_path).rows if row.remarks}
    assert list(remarks) == ["Stage 2"]
    assert remarks["Stage 2"][0].startswith("does not compare: ") and said in remarks["Stage 2"][0]


def test_other_model_is_marked_where_models_share_a_table(tmp_path):
    for gpus, model in ((2, "a"), (4, "a"), (6, "b")):
        add_run(tmp_path, f"deepspeed-multi-gpu/{gpus}_gpus", str(gpus), settings__model_name=model)
    found = table(tmp_path, "multi-gpu-weak-scaling")
    assert found.rows[2].remarks == ["does not compare: model_name b, others a"]


def test_reference_that_does_not_compare_is_marked(tmp_path):
    stages = "deepspeed-multi-gpu/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "1", settings__labels="all")
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "2")
    (row, *_) = table(tmp_path, "offload-trade-off").rows
    assert row.remarks == ["no offload (job 1): does not compare: labels all, others sequence"]


def test_mean_and_spread_over_repeats_that_compare(tmp_path):
    for job, rate in (("1", 10.0), ("2", 12.0), ("3", 14.0)):
        add_run(tmp_path, STAGE, job, train__steady_samples_per_second=rate)
    add_run(tmp_path, STAGE, "4", status="failed", exit_code=1)
    add_run(tmp_path, STAGE, "0", settings__labels="answer", train__steady_samples_per_second=99.0)
    row = stage_1(tmp_path, all_runs=True)
    assert (row.cells[-1].value, row.cells[-1].spread, row.cells[-1].count) == (12, 2, 3)
    assert row.cells[-1].text == "12 ± 2 (3)"
    assert "job 0 is not in the mean: labels answer instead of sequence" in row.remarks


def test_run_that_differs_from_its_script_is_marked(tmp_path):
    """2_gpus with --nodes=3 does not fill the row "2 GPUs" as if it were that."""
    add_run(tmp_path, STAGE, "1", overrides=["nodes: 3 instead of 2", "time: 1 instead of 2"])
    row = stage_1(tmp_path)
    assert row.status == "completed, does not compare"
    assert row.remarks == ["completed: does not compare: nodes: 3 instead of 2, time: 1 instead of 2"]
    write_report([tmp_path], tmp_path / "report", all_runs=False)
    assert '<td class="bad">completed, does not compare</td>' in (tmp_path / "report" / "index.html").read_text()
    add_run(tmp_path, STAGE, "0", overrides=[])
    row = stage_1(tmp_path, all_runs=True)
    assert (row.jobs, row.status) == ("0", "completed")
    assert row.remarks == [
        "the newer job 1 is not shown: it does not compare: nodes: 3 instead of 2, time: 1 instead of 2",
        "job 1 is not in the mean: nodes: 3 instead of 2; time: 1 instead of 2",
    ]


def test_reference_that_differs_from_its_script_is_marked(tmp_path):
    stages = "deepspeed-multi-gpu/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "1", overrides=["nodes: 3 instead of 2"])
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "2")
    (row, *_) = table(tmp_path, "offload-trade-off").rows
    assert row.remarks == ["no offload (job 1): does not compare: nodes: 3 instead of 2"]


RESTART = {"time": "2026-11-20T10:00:20+00:00", "reason": "node failure", "step": 4}
ANEW = RESTART | {"step": 0}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"attempt": 1, "restarts": []}, ""),
        ({"attempt": 2, "restarts": [RESTART]}, "resumed 1 time"),
        ({"attempt": 3, "restarts": [RESTART, RESTART]}, "resumed 2 times"),
        ({"attempt": 3, "restarts": [ANEW, RESTART]}, "resumed 1 time; begun anew 1 time"),
        ({"attempt": 2, "restarts": []}, "attempt 2"),
        ({"attempt": 2, "restarts": [RESTART], "status": "oom", "exit_code": 1}, "exit code 1; resumed 1 time"),
    ],
)
def test_run_that_was_resumed_says_so(tmp_path, changes, note):
    add_run(tmp_path, STAGE, "1", **changes)
    run = only(tmp_path)
    assert run.status_note == note
    assert stage_1(tmp_path).remarks == ([f"{run.status}: {note}"] if note else [])


def test_logs_of_a_resumed_run_are_whole(tmp_path):
    """Each restart explains one more header, and other nodes and GPUs than those of the end."""
    logs = {"gpu": gpu_log(100, 900, 500) + gpu_log(100, 700, 500), "cpu": cpu_log(10, 90, 50) + cpu_log(10, 90, 50)}
    folder = add_run(tmp_path, STAGE, "1", **logs, restarts=[RESTART], world_size=1, nodes=["n1"])
    run = only(tmp_path)
    assert (run.problems, run.gpu.peak, run.gpu.mean) == ([], 900, pytest.approx(2800 / 6))
    write(folder / "gpu_memory" / "gpu_memory_log_1_n2.csv", gpu_log(100, 999, gpus=2))
    run = only(tmp_path)
    assert (run.problems, run.gpu.peak) == ([], 999)
    add_run(tmp_path, STAGE, "1", **logs, world_size=1, nodes=["n1"])
    assert [problem.split(": ")[-1] for problem in only(tmp_path).problems] == [
        "another header, the logger was restarted",
        "2 log(s) (, n2) for 1 node(s)",
        "another header, the logger was restarted",
    ]


def test_mean_of_a_loss_that_diverged(tmp_path):
    for job, loss in (("1", 2.0), ("2", math.nan)):
        add_run(tmp_path, "baseline", job, train__loss_mean=loss)
    row = table(tmp_path, "baseline", all_runs=True).rows[0]
    assert row.cells[0].text == "nan ± nan (2)"


def test_log_of_a_job_whose_id_has_a_line_in_it(tmp_path):
    """It is no log of a job without a record."""
    folder = add_run(tmp_path, STAGE, "1", gpu=None)
    (folder / "results" / "1.json").rename(folder / "results" / "my_job.json")
    record = (folder / "results" / "my_job.json").read_text()
    (folder / "results" / "my_job.json").write_text(record.replace('"job_id": "1"', '"job_id": "my_job"'))
    (folder / "cpu_memory" / "cpu_memory_log_1.txt").rename(folder / "cpu_memory" / "cpu_memory_log_my_job_n1.txt")
    run = only(tmp_path)
    assert (run.job_id, run.cpu.peak, run.problems) == ("my_job", 90, [])


@pytest.mark.parametrize(("ended", "hours"), [(None, None), ("2026-11-20T09:00:00+00:00", None)])
def test_gpu_hours_of_a_run_without_an_end(tmp_path, ended, hours):
    add_run(tmp_path, STAGE, "1", hardware__gpus=4, finished=ended)
    assert only(tmp_path).gpu_hours() == (hours, "its end was not recorded")


def test_gpu_hours_of_a_resumed_run_are_those_of_all_parts(tmp_path):
    part = RESTART | {"started": "2026-11-20T08:00:00+00:00", "finished": "2026-11-20T08:30:00+00:00"}
    changes = {"hardware__gpus": 4, "finished": "2026-11-20T10:30:01+00:00"}
    add_run(tmp_path, STAGE, "1", **changes, restarts=[part])
    assert only(tmp_path).gpu_hours() == (4, "")
    add_run(tmp_path, STAGE, "1", **changes, restarts=[part | {"finished": None}])
    assert only(tmp_path).gpu_hours() == (None, "the end of a part was not recorded")


def test_gpu_hours(tmp_path):
    changes = {"hardware__gpus": 4, "finished": "2026-11-20T11:30:01+00:00"}
    add_run(tmp_path, STAGE, "1", **changes)
    assert only(tmp_path).gpu_hours() == (6, "")


# --- logs in the wild: content, then peak, low and mean, and the reason

LINE = "2026/11/20 22:00:15.000, 0, Tesla V100-SXM2-32GB, {}, 32768\n"
GOOD = gpu_log(100, 900, 500)
GPU_LOGS = {
    "header alone": (GPU_HEADER + "\n", None, "{}: no sample"),
    "cut in the value": (
        GOOD + "2026/11/20 22:00:15.000, 0, Tesla V100-SXM2-32GB, 99",
        (900, 100, 500),
        "{}:5: no sample",
    ),
    "cut in the total": (GOOD + LINE.format(99)[:-4], (900, 100, 500), "{}:5: no sample (2026"),
    "not available": (GOOD + LINE.format("[N/A]"), (900, 100, 500), "{}:5: no sample"),
    "not supported": (GOOD + LINE.format("[Not Supported]"), (900, 100, 500), "{}:5: no sample"),
    "never available": (GPU_HEADER + "\n" + LINE.format("[N/A]"), None, "{}: no sample"),
    "two headers": (GOOD + gpu_log(400), (900, 100, 475), "{}:5: another header, the logger was restarted"),
    "two lines in one": (GOOD + LINE.format(4)[:-7] + LINE.format(700), (900, 100, 500), "{}:5: no sample"),
    "other program": (
        GOOD + "Unable to determine the device handle: Unknown Error\n",
        (900, 100, 500),
        "{}:5: no sample",
    ),
    "nan": (GOOD + LINE.format("nan"), (900, 100, 500), "{}:5: no sample"),
    "negative": (GOOD + LINE.format(-5), (900, 100, 500), "{}:5: no sample"),
    "more than there is": (GOOD + LINE.format(99999), (900, 100, 500), "{}:5: no sample"),
    "not UTF-8": (GOOD.encode() + b"\xff\xfe\x00\n", (900, 100, 500), "{}:5: not UTF-8"),
    "other columns": (
        "timestamp, memory.used [MiB]\n2026/11/20 22:00:15.000, 900\n",
        None,
        "{}:1: a column is missing",
    ),
    "second GPU": (gpu_log(100, 900, gpus=2), None, "{}: GPU(s) 0, 1 logged, the job ran on 1 of that node"),
}


@pytest.mark.parametrize(("content", "numbers", "reason"), GPU_LOGS.values(), ids=GPU_LOGS)
def test_damaged_gpu_log(tmp_path, content, numbers, reason):
    folder = add_run(tmp_path, STAGE, "1", gpu=content)
    row = stage_1(tmp_path)
    assert row.status == "completed, incomplete"
    memory = row.run.gpu
    assert (memory.peak, memory.minimum, memory.mean) == (numbers or (None, None, None))
    path = folder / "gpu_memory" / "gpu_memory_log_1.csv"
    assert any(remark.startswith("incomplete: " + reason.format(path)) for remark in row.remarks), row.remarks
    write_report([tmp_path], tmp_path / "report", all_runs=True)


SAME = {
    "with units": GOOD.replace(", 32768", " MiB, 32768 MiB"),
    "without header": GOOD.split("\n", 1)[1],
    "Windows line ends": GOOD.replace("\n", "\r\n"),
    "without the last line end": GOOD.rstrip("\n"),
    "blank lines": GOOD.replace("\n", "\n\n"),
    "other order": "timestamp, memory.total [MiB], memory.used [MiB], index, name\n"
    + "".join(f"2026/11/20 22:00:{s:02d}.000, 32768, {mib}, 0, V100\n" for s, mib in ((0, 100), (5, 900), (10, 500))),
}


@pytest.mark.parametrize("content", SAME.values(), ids=SAME)
def test_log_that_says_the_same_in_another_way(tmp_path, content):
    add_run(tmp_path, STAGE, "1", gpu=content)
    row = stage_1(tmp_path)
    assert row.status == "completed", row.remarks
    assert (row.run.gpu.peak, row.run.gpu.minimum, row.run.gpu.mean) == (900, 100, 500)


CPU_LOGS = {
    "header alone": (CPU_HEADER + "\n", None, "{}: no sample"),
    "cut": (cpu_log(10, 90, 50) + "  15.000  99.0  1", (90, 50), "{}:5: no sample (15.000  99.0  1)"),
    "restarted": (cpu_log(10, 90, 50) + cpu_log(50), (90, 50), "{}:5: another header"),
    "two lines in one": (cpu_log(10, 90, 50)[:-1] + cpu_log(5).split("\n")[1], (90, 50), "{}:4: no sample"),
    "text": (cpu_log(10, 90, 50) + "Traceback (most recent call last):\n", (90, 50), "{}:5: no sample"),
    "too short": (cpu_log(10, 90, 50, step=1), (90, 50), "{}: it covers 2 s of a training of 15 s"),
}


@pytest.mark.parametrize(("content", "numbers", "reason"), CPU_LOGS.values(), ids=CPU_LOGS)
def test_damaged_cpu_log(tmp_path, content, numbers, reason):
    folder = add_run(tmp_path, STAGE, "1", cpu=content)
    run = only(tmp_path)
    assert run.status == "completed" and run.problems
    assert (run.cpu.peak, run.cpu.mean) == (numbers or (None, None))
    path = folder / "cpu_memory" / "cpu_memory_log_1.txt"
    assert any(problem.startswith(reason.format(path)) for problem in run.problems), run.problems


def test_empty_logs(tmp_path):
    folder = add_run(tmp_path, STAGE, "1")
    for path in (folder / "gpu_memory" / "gpu_memory_log_1.csv", folder / "cpu_memory" / "cpu_memory_log_1.txt"):
        path.write_bytes(b"")
    run = only(tmp_path)
    assert [problem.split(": ")[-1] for problem in run.problems] == ["no sample", "no sample"]


def test_nodes_are_summed_up_only_when_all_are_there(tmp_path):
    folder = add_run(tmp_path, STAGE, "1", gpu=None, nodes=["n1", "n2"], world_size=4)
    logs = folder / "gpu_memory"
    write(logs / "gpu_memory_log_1_n1.csv", gpu_log(100, 300, gpus=2))
    run = only(tmp_path)
    assert run.gpu.peak is None and run.gpu.reason.endswith("1 log(s) (n1) for 2 node(s)")
    write(logs / "gpu_memory_log_1_n2.csv", gpu_log(200, 800, gpus=2))
    run = only(tmp_path)
    assert (run.gpu.peak, run.gpu.minimum, run.gpu.mean) == (800, 100, 350)


def test_memory_of_a_whole_gpu_is_not_that_of_a_slice(tmp_path):
    add_run(tmp_path, STAGE, "1", hardware__gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    run = only(tmp_path)
    assert run.gpu.peak is None
    assert run.gpu.reason == "the job ran on MIG slices, and nvidia-smi logs the memory of whole GPUs"
    assert run.cpu.peak == 90
    assert run.status == "completed" and not run.problems


def test_many_problems_are_counted_not_listed(tmp_path):
    path = tmp_path / "gpu_memory_log_1.csv"
    write(path, GPU_HEADER + "\n" + LINE.format("[N/A]") * 500)
    assert memory_logs.read_gpu_log(path).gaps()[3:] == [f"{path}: 497 more such lines"]


def test_old_tables_do_not_stay(tmp_path):
    folder = add_run(tmp_path, STAGE, "1")
    write_report([tmp_path / "experiments"], tmp_path / "report", all_runs=False)
    assert (tmp_path / "report" / f"{TABLE}.csv").exists()
    shutil.rmtree(folder)
    add_run(tmp_path, "baseline", "2")
    write_report([tmp_path / "experiments"], tmp_path / "report", all_runs=False)
    assert not (tmp_path / "report" / f"{TABLE}.csv").exists()
    assert (tmp_path / "report" / "baseline.csv").exists()


def test_speed_over_memory_shows_each_completed_run_as_one_point(tmp_path):
    measured = {"recipe": (900, 0.5), "bf16": (700, 1.5), "all": (300, 5.0)}
    for number, (name, (peak, rate)) in enumerate(measured.items(), 1):
        changes = {"train__steady_samples_per_second": rate}
        add_run(tmp_path, f"efficiency/{name}", str(number), gpu=gpu_log(100, peak, 50), **changes)
    add_run(tmp_path, "efficiency/chunked_loss", "9", status="failed", exit_code=1)
    rows = [plots.Shown(row.label, row.run) for row in table(tmp_path, "efficiency-tiny-bloom").rows if row.run]
    axis = plots.speed(rows).figure.axes[0]
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines if len(line.get_xdata()) == 1]
    assert sorted(points) == sorted(measured.values())
    assert axis.get_xlabel() == "peak GPU memory (MiB)"
    assert plots.speed(rows[:1]) is None, "one point compares with nothing"
