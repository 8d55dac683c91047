"""The end of a job: the status of its record, and the summary in its log."""

import os
import re
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import pytest

from job import end_of_job
from job.end_of_job import begin_attempt, end_attempt, summary, sweep
from records.schema import Attempt, Hardware, Record, read_attempts, read_record, write_attempts
from shared.json_files import write_json

PATH = Path("results/7.json")
RUN_DIR = Path("results/.7/1")  # run_job.py creates it for the first attempt of job 7
GPU_LINE = "2026/01/31 10:00:00.123, 0, NVIDIA H200, {}, 143771, 212.40, 98\n"


def run_file(name: str) -> Path:
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    return RUN_DIR / name


def end(code: int, /, number: int = 1, ranks: int = 8, **record: object) -> int:
    """End an attempt of job 7 whose training has left this record. Return the job's exit code."""
    if record:
        PATH.parent.mkdir(exist_ok=True)
        write_json(PATH, {"world_size": ranks} | record)
    attempt = Attempt(attempt=number)
    write_attempts(PATH, [attempt])
    return end_attempt(PATH, RUN_DIR, attempt, code, False, ranks).code


# The table in end_of_job.py. "..." stands for any words
CELLS = r"^    (\S.*?)  +(\S.*?)  +(\S+)  +(\S.*?)  +->  (\S+)  +(\S+)  +(.+)"
HEAD, *ROWS = re.findall(CELLS, end_of_job.__doc__, re.MULTILINE)


@pytest.mark.parametrize(HEAD, ROWS)
def test_an_attempt_ends_as_the_table_says(monkeypatch, capsys, training, first, signal, slurm, status, code, reason):
    answers = {"sinfo": "node3" * (slurm == "node3 down"), "sacct": slurm.replace("-", "")}
    monkeypatch.setattr(end_of_job, "ask_slurm", lambda program, *_: answers.get(program, ""))
    monkeypatch.setattr(end_of_job, "queued_jobs", dict)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node3")
    exit_code, _, process = first.partition(" ")
    # Rank 6 failed later, which does not count. Without `process`, a launcher returns the exit code, and 0 wins
    notes = f"6 137 rank 6\n5 {first}\n" if process else "6 137 rank 6\n" * training.startswith("completed")
    run_file("exit_codes").write_text(notes)
    if training != "-":
        ended, its_code, noted = re.fullmatch(r"(\w+) ?(\d*) ?(.*)", training).groups()
        end = {"exit_code": int(its_code), "finished": "2026-01-01T00:00:00+00:00"} if its_code else {}
        end |= {"world_size": 1 if process == "the only process" else 8}
        write_json(PATH, {"status": ended, "reason": noted or None} | end)
    noted_signal = {"status": "stopped", "exit_code": 143} if signal == "yes" else {}
    attempt = Attempt(attempt=1, nodes=["node3"], **noted_signal)
    write_attempts(PATH, [attempt])
    if first == "gone":
        sweep(Path("results"))
    elif first == "again":
        begin_attempt(PATH, 1)
    else:
        launcher = 1 if process else int(exit_code.replace("-", "0"))
        assert str(end_attempt(PATH, RUN_DIR, attempt, launcher, slurm == "TimeLimit", 8).code) == code
    found = read_attempts(PATH)[0]
    assert found.finished
    expected = f"{status} {code} {reason}".replace(" -", " None").replace("...", "*")
    assert fnmatch(f"{found.status} {found.exit_code} {found.reason}", expected)
    shown = capsys.readouterr().out.splitlines()
    assert (f"status: {status} (exit code {code})" in shown) == (first not in ("gone", "again"))
    assert found.reason in (None, *shown) or first in ("gone", "again")


def test_the_summary_of_a_job_uses_only_its_own_logs():
    """Job 47 has two nodes, and the folders also hold logs of jobs 471 and 4."""
    for kind, suffix in (("gpu", "csv"), ("cpu", "txt")):
        Path(f"{kind}_memory").mkdir()
        for name in ("4", "47_node1", "47_node2", "471", "471_node1"):
            lines = GPU_LINE.format(len(name)) if kind == "gpu" else f"0.0 0.0 {len(name)} 9.0\n"
            Path(f"{kind}_memory/{kind}_memory_log_{name}.{suffix}").write_text(lines)
    lines = summary("47", None, 2, [], earlier=False)
    assert [line.split(":")[0] for line in lines[:6]] == [
        "GPU 0 memory on node1",
        "GPU 0 power on node1",
        "GPU 0 memory on node2",
        "GPU 0 power on node2",
        "CPU memory on node1",
        "CPU memory on node2",
    ]
    assert lines[6:] == ["missing: no run record: the job ended before the training began"]
    lines = summary("4", None, 2, [], earlier=False)
    assert [line.split(":")[0] for line in lines[:3]] == ["GPU 0 memory", "GPU 0 power", "CPU memory"]


@pytest.mark.parametrize(
    "noted",
    [
        " 75 launcher 0 on node1\n",
        " 143 launcher 1 on node2\n5 75 launcher 0 on node1\n",
        "4\n5 75 launcher 0 on node1\n4 143",
        "\0\0\0\n\n5 75 launcher 0 on node1\n\ufffd 143 rank",
    ],
)
def test_a_damaged_note_neither_fails_a_job_nor_hides_its_exit_code(noted):
    """A line of `exit_codes` may lack its time or, after a full disk, its end. `missing_node1` is unreadable."""
    run_file("exit_codes").write_text(noted)
    run_file("missing_node1").mkdir()
    assert end(1) == 75


def test_a_job_that_runs_or_has_ended_with_a_summary_is_not_closed(monkeypatch):
    """Job 48 still runs, and the folder of job 49 is removed. A rank has closed the record of each."""
    monkeypatch.setattr(end_of_job, "queued_jobs", lambda: ["48"])
    Path("results/.48").mkdir(parents=True)
    for job in ("48", "49"):
        end = {"status": "failed", "exit_code": 1, "finished": "2026-01-01T00:00:00+00:00"}
        write_json(Path(f"results/{job}.json"), end)
    sweep(Path("results"))
    assert not Path("results/jobs").exists() and Path("results/.48").exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_job_that_ends_before_its_record_exists(capsys, earlier):
    """The job has one process, so no `ended first` is shown. The record of an earlier attempt stays unchanged."""
    run_file("exit_codes").write_text("1 2 rank 0 on node1\n")
    record = {"status": "stopped", "exit_code": 75, "attempt": 1} if earlier else {}
    missing = "no run record: the job ended before the training began"
    if earlier:
        missing = (
            "no run record of this attempt: it ended before its training began; "
            "results/7.json is from an earlier attempt"
        )
    assert end(2, number=2, ranks=1, **record) == 2
    assert not earlier or read_record(PATH).status == "stopped"
    assert capsys.readouterr().out.splitlines()[2:-1] == ["status: failed (exit code 2)", f"missing: {missing}"]


def test_lost_attempts_keep_their_reasons_and_get_an_end(monkeypatch):
    """Slurm restarts a job after each crash of a node. When the second node crashes, the first one is up again.

    A rank closed the record of the first attempt, and the training of the third one ended before its node crashed.
    """
    PATH.parent.mkdir()
    day = "2026-01-0{}T00:00:00+00:00"
    records = [
        {"status": "failed", "exit_code": 3, "finished": day.format(1)},
        {},
        {"status": "completed", "exit_code": 0, "finished": day.format(3)},
        {},
    ]
    for number, (down, record) in enumerate(zip(("", "node1", "node2", "node1"), records, strict=True)):
        monkeypatch.setattr(end_of_job, "ask_slurm", lambda *words, down=down: down)
        begin_attempt(PATH, number, nodes=["node1", "node2"])
        write_json(PATH, {"status": "running", "attempt": number + 1} | record)
        os.utime(PATH, (time := datetime(2026, 1, 2, tzinfo=UTC).timestamp(), time))
    attempts = end_of_job.read_attempts(PATH)
    assert [(each.status, each.exit_code, each.reason) for each in attempts] == [
        ("failed", 3, "node failure on node1"),
        ("failed", None, "node failure on node2"),
        ("completed", 0, "node failure on node1"),
        ("running", None, None),
    ]
    assert [each.finished.isoformat() for each in attempts[:3]] == list(map(day.format, (1, 2, 3)))
    assert read_record(PATH).status == "running"


TRAIN = {"samples_per_second": 12.345, "steady_samples_per_second": 20.5}


@pytest.mark.parametrize(
    ("record", "code", "line"),
    [
        ({"train": TRAIN}, 0, "samples per second: 12.35 (Trainer), 20.50 (steps alone)"),
        ({"train": TRAIN | {"steady_samples_per_second": None}}, 0, "samples per second: 12.35 (Trainer)"),
        ({"train": None}, 1, "missing: samples per second: the training did not finish"),
        (None, 1, "missing: no run record: the job ended before the training began"),
        (None, 0, "missing: no run record: the job is not a training"),
    ],
)
def test_the_summary_shows_the_rate_or_why_it_is_missing(record, code, line):
    record = Record(status="completed", **record) if record else None
    assert summary("7", record, code, [], earlier=False) == [line]


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (300.0, "GPU 0 power: mean 212 W (71 % of its limit of 300 W)"),
        (None, "GPU 0 power: mean 212 W"),
    ],
)
def test_the_summary_shows_the_mean_power_of_each_gpu(limit, line):
    """GPU 1 has no sensor."""
    Path("gpu_memory").mkdir()
    second = GPU_LINE.format(9).replace(", 0, ", ", 1, ").replace("212.40, 98", "[N/A], [N/A]")
    lines = GPU_LINE.format(7) + second + GPU_LINE.format(7).replace("212.40", "211.60") + second
    Path("gpu_memory/gpu_memory_log_7.csv").write_text(lines)
    record = Record(status="completed", train=TRAIN, hardware=Hardware(gpus=2, gpu_power_limit_w=limit))
    shown = summary("7", record, 0, [], earlier=False)
    assert [row for row in shown if "power" in row] == [line, "missing: GPU 1 power: nvidia-smi reported none"]
    assert "GPU 1 memory: peak 9 MiB, mean 9 MiB (2 samples)" in shown


LOG = "gpu_memory/gpu_memory_log_7.csv"


@pytest.mark.parametrize(
    ("unknown", "lines"),
    [
        ("212.40", [f"missing: {LOG}:1", f"missing: {LOG}: no sample"]),
        ("143771", ["GPU 0 power: mean 212 W", "missing: GPU 0 memory: nvidia-smi reported none"]),
    ],
)
def test_the_summary_reports_an_empty_log_and_a_gpu_without_memory_of_its_own(unknown, lines):
    Path("gpu_memory").mkdir()
    Path(LOG).write_text(GPU_LINE.format("[N/A]").replace(unknown, "[N/A]"))
    shown = summary("7", Record(status="completed", train=TRAIN), 0, [], earlier=False)
    assert [line.split(": no sample (")[0] for line in shown if not line.startswith("samples")] == lines


def test_without_a_gpu_one_line_replaces_the_rows_of_a_gpu():
    noted = ["nvidia-smi is not installed on n1: no gpu_memory/gpu_memory_log_7.csv", "psrecord is not installed on n1"]
    record = Record(status="completed", train=TRAIN, hardware=Hardware(gpus=0))
    lines = summary("7", record, 0, noted, earlier=False)
    assert lines[0] == "no GPU: the rows of its memory are left out"
    assert [line for line in lines if line.startswith("missing")] == ["missing: psrecord is not installed on n1"]
    with_gpu = record.model_copy(update={"hardware": Hardware(gpus=1)})
    assert f"missing: {noted[0]}" in summary("7", with_gpu, 0, noted, earlier=False)
