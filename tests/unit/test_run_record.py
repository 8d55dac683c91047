"""The run record: its content, its atomic replacement, and its closing at the end of a run."""

import errno
import importlib.metadata
import json
import math
import os
import resource
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from job.memory_logs import local_seconds
from measure import measured_memory
from measure.energy import EnergyMeter
from measure.measured_memory import record_peaks
from records import writer
from records.schema import WITHOUT_A_WORD, Attempt, read_record, write_attempts
from records.writer import RunRecord
from shared.errors import WorkshopError
from shared.json_files import write_json
from shared.paths import workshop_version
from training.callbacks import MeasureCallback

# tests/commands/test_files.py tests the state that git really reports
GIT = {"commit": "0" * 40, "dirty": False}


@pytest.fixture(autouse=True)
def fixed_git_state(monkeypatch):
    """Replace the call of git, because unit tests must not start a process."""
    monkeypatch.setattr("records.writer.git_state", lambda: GIT)


METRICS = dict.fromkeys(("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"), 1.0)
STEADY = {"warm_up_seconds": 3.5, "steady_steps": 4, "steady_steps_per_second": 1.0, "steady_samples_per_second": 2.0}


def make_record(steady: dict, means: dict, held: dict | None, reason: str = "", log: tuple = ()) -> RunRecord:
    """Return the record of a run whose callbacks measured these values."""
    run = RunRecord("7", "output/7")
    run.start(0)
    callback = begin_training(run)
    callback.speed.summary = lambda reasons, summary=callback.speed.summary: summary(reasons) | steady
    callback.utilisation.means = lambda: means
    callback.model_state = held
    if reason:
        run.reasons["callbacks.avg_gpu_util_%"] = reason
    callback.on_train_end(None, SimpleNamespace(global_step=16, log_history=[*log, METRICS]), None)
    return run


def begin_training(record: RunRecord) -> MeasureCallback:
    """Return the callback of a training run that begins now, without GPU."""
    args = SimpleNamespace(device="cpu", deepspeed=None)
    state = SimpleNamespace(global_step=0)
    trainer = SimpleNamespace(args=args, state=state, train_dataset=range(8), steps_per_epoch=2, get_tp_size=lambda: 1)
    trainer.keep_counts = lambda speed: None
    settings = SimpleNamespace(data=SimpleNamespace(profile=False))
    run = SimpleNamespace(record=record, energy=EnergyMeter(), flops=None, peak=1e12, settings=settings)
    callback = MeasureCallback(run, trainer)
    callback.on_train_begin(args, state, None)
    return callback


def test_every_field_that_a_run_writes_is_described():
    held = {
        "parameters": 8,
        "gradients": None,
        "optimizer_state": 16,
    }  # DeepSpeed without accumulation keeps no gradients
    run = make_record(STEADY, {"avg_cpu_util_%": 90.0}, held, log=({"loss": 3.0}, {"eval_loss": 1.0}, {"loss": 2.0}))
    record = read_record(run.path)
    for part in (record, record.train, record.hardware, record.git, *record.held):
        assert not part.model_extra, "fields that records/schema.py does not describe"
    assert record.train.loss_last == 2
    assert (record.experiment, record.git.commit) == ("work", GIT["commit"])
    assert record.versions["workshop"] == workshop_version()
    assert record.versions["torch"] == importlib.metadata.version("torch")
    assert record.missing["held.gradients"] == "without accumulation, DeepSpeed frees them within the step"


def test_unknown_fields_are_kept_when_a_record_is_rewritten():
    path = Path("7.json")
    content = {
        "schema": 1,
        "status": "running",
        "started": "2026-11-20T22:32:22+00:00",
        "new": [1],
        "train": {"new": 2},
    }
    content |= {"hardware": {"gpu": None, "new": {"deep": True}}, "eval": [{"epoch": 1.0, "loss": None}]}
    write_json(path, content)
    run = RunRecord("7", "output/7")
    run.path = path
    run.change(status="failed", exit_code=3, finished=datetime(2026, 11, 20, 23, tzinfo=UTC))
    end = {"status": "failed", "exit_code": 3, "finished": "2026-11-20T23:00:00+00:00", "attempt": 1}
    assert json.loads(path.read_text()) == content | end


def test_an_earlier_attempt_changes_nothing_of_a_later_one(monkeypatch):
    """A node that hangs, and continues after Slurm has restarted the job elsewhere."""
    runs = []
    for attempt in ("1", "2"):
        monkeypatch.setenv("ATTEMPT", attempt)
        runs.append(RunRecord("7", "output/7"))
        runs[-1].start(0)
    first, second = runs
    assert math.isnan(second.earlier_kwh), "the first attempt has recorded no energy"
    before = second.path.read_bytes()
    first.update(f1=1.0)
    first.close_as_hung(WorkshopError("hang", "no progress of rank 1", "look at it", 3))
    first.close(None)
    assert second.path.read_bytes() == before
    assert read_record(second.path).restarts[0].reason == WITHOUT_A_WORD


@pytest.mark.parametrize(("finished", "end"), [("10:00:00", ("failed", 137)), ("10:00:09", ("stopped", 75))])
def test_a_training_that_ends_after_its_job_knows_better_how(finished, end):
    """srun returns although a rank still saves its checkpoint."""
    path = Path("results/7.json")
    path.parent.mkdir()
    day = "2026-11-20T{}+00:00"
    write_json(path, {"status": "stopped", "exit_code": 75, "finished": day.format(finished)})
    job = Attempt(attempt=1, status="failed", exit_code=137, finished=day.format("10:00:05"), overrides=["nodes: 1"])
    write_attempts(path, [job])
    record = read_record(path)
    assert (record.status, record.exit_code, record.overrides) == (*end, ["nodes: 1"])


def test_a_value_that_was_not_measured_is_empty_with_a_reason():
    rates = ("warm_up_seconds", "steady_steps_per_second", "steady_samples_per_second")
    none = dict.fromkeys(rates) | {"steady_steps": 0}
    run = make_record(none, {"avg_gpu_util_%": None}, None, "no nvidia-ml-py")
    content = json.loads(run.path.read_text())
    assert content["peak_gpu_memory"] is None
    assert content["train"]["loss_last"] is None
    assert content["callbacks"]["avg_gpu_util_%"] is None
    assert content["missing"] == {
        "energy": "no GPU",
        "gpu_activity": "no GPU",
        "peak_gpu_memory": "no GPU",
        "peak_pinned_memory": "no GPU",
        "held": "the training had no second step",
        "train.warm_up_seconds": "too few steps for a warm-up",
        "train.steady_samples_per_second": "too few steps after the warm-up",
        "train.steady_tokens_per_second": "too few steps after the warm-up",
        "train.mfu_percent": "too few steps after the warm-up",
        "callbacks.avg_gpu_util_%": "no nvidia-ml-py",
    }
    assert {key for key in content if "." in key} == set()
    assert content["peak_process_mib"][0] > 50


def test_peaks_of_memory_are_recorded_and_an_unknown_one_has_a_reason(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**20)
    # torch 2.13 uses these names
    stats = {"active_bytes.peak": 2 * 2**30, "allocated_bytes.peak": 4 * 2**30, "num_host_alloc": 1}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    monkeypatch.setattr(measured_memory, "peak_process_mib", lambda: None)
    run = RunRecord("7", "output/7")
    record_peaks(run)
    assert run.content["peak_gpu_memory"] == [{"allocated_mib": 3, "reserved_mib": 4}]
    assert run.content["peak_pinned_memory"] == [{"active_mib": 2048, "allocated_mib": 4096}]
    assert run.content["peak_process_mib"] is None
    assert run.content["missing"]["peak_process_mib"] == "this system does not count it"


@pytest.mark.parametrize("local_zone", ["IST-5:30"], indirect=True)
def test_pauses_have_local_times_and_those_of_earlier_attempts_are_kept(local_zone):
    """nvidia-smi logs the local time of its node."""
    for step, what in ((0, "saving"), (4, "evaluation")):
        run = RunRecord("7", "output/7")
        run.start(step)
        with run.pause(what):
            pass
    pauses = json.loads(run.path.read_text())["pauses"]
    assert [pause["what"] for pause in pauses] == ["saving", "evaluation"]
    assert all(pause[name].endswith("+05:30") for pause in pauses for name in ("started", "finished"))
    finished = read_record(run.path).pauses[-1].finished
    assert local_seconds(finished) - finished.timestamp() == pytest.approx(5.5 * 3600)


def test_a_number_that_is_not_finite_becomes_null():
    path = Path("7.json")
    write_json(path, {"train": {"loss_mean": float("nan"), "x": 1.5}, "eval": [{}, {"loss": -math.inf}]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "train": {"loss_mean": None, "x": 1.5},
        "eval": [{}, {"loss": None}],
    }


def test_an_interrupted_write_keeps_the_record_and_leaves_no_other_file():
    """A limit on the file size simulates a full disk: the file is created, and the write fails."""
    path = Path("7.json")
    write_json(path, {"status": "running"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, {"status": "completed"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_bytes()) == {"status": "running"}
    assert [p.name for p in Path().iterdir()] == ["7.json"]


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOSPC, "No space left on device); free disk space or quota"),
        (errno.EDQUOT, "Disk quota exceeded); free disk space or quota"),
        (errno.EROFS, "Read-only file system); check the path and its permissions"),
    ],
)
def test_a_record_that_cannot_be_written_has_a_remedy_for_the_cause(monkeypatch, refusal, number, problem):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer, "write_json", fail)
    line = refusal(RunRecord("7", "output/7").start, 0, code=3)
    assert line == f"error: results/7.json: cannot be written ({problem}"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "completed", 0),
        (RuntimeError("x"), "failed", 1),
        (SystemExit(3), "failed", 3),
        (WorkshopError("knob audit", "differs", "correct it", 3), "failed", 3),
        (SystemExit(143), "stopped", 143),
        (SystemExit(75), "stopped", 75),
        (torch.OutOfMemoryError("x"), "oom", 1),
        # out of memory in NCCL, cuBLAS, cudaHostAlloc (pinned memory), Triton and the CPU's allocator
        (torch.distributed.DistBackendError("ncclUnhandledCudaError\nCuda failure 2 'out of memory'"), "oom", 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom", 1),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "oom", 1),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom", 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."), "oom", 1),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, BaseException) else str(value),
)
def test_the_record_has_the_status_and_exit_code_of_the_run(error, status, code):
    run = RunRecord("7", "output/7")
    try:
        with run:
            run.start(0)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    content = json.loads(run.path.read_text())
    assert (content["status"], content["exit_code"]) == (status, code)
    assert content["finished"]


def test_other_ranks_write_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with RunRecord("7", "output/7") as run:
        run.start(0)
        run.update(f1=1.0)
    assert list(Path().iterdir()) == []


def test_a_run_continues_on_a_file_system_without_locks(monkeypatch, capsys):
    def fail(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(writer.fcntl, "flock", fail)
    with RunRecord("7", "output/7"):
        print("runs")
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "results/.7: this file system has no locks, so start no second run that writes here"
    assert (second, last) == (first.replace("results/.7", "output/7"), "runs")
    assert not any(Path().rglob("*.*")), "no file is left"
