"""What a run notes of its own predictions. Real runs: tests/integration/test_estimate.py."""

import json

import pytest
import torch

from estimate_memory import GIB
from estimate_time import Rates
from helpers import REPOSITORY
from planned import read_options
from training import prediction
from training.prediction import bus_bandwidth, predict_memory, predict_time
from training.record import RunRecord

FLAGS = ("--model_name", "tiny-bloom", "--max_length", "64", "--fp16", "False")
RATES = Rates(matmul=2e11, memory=1e10)
# of 10 steps of 16 questions with 40 tokens each, 10 of them padding, and 20 that count
TRAINED = {"real_tokens": 160 * 30, "padding_tokens": 160 * 10, "counted_tokens": 160 * 20}


@pytest.fixture
def record(tmp_path) -> RunRecord:
    return RunRecord("a", str(tmp_path))


def options(*flags: str):
    chosen = read_options([*FLAGS, *flags], "", environment={}, gpu=False)
    for flag in ("gpus", "nodes"):
        del chosen.values[flag]  # train.py has no such flags
    return chosen


def on_disk(record: RunRecord) -> dict:
    return json.loads(record.path.read_text())


def predicted(record: RunRecord, *flags: str, **trained: int) -> dict:
    chosen = options(*flags)
    predict_memory(chosen, record)
    record.update(train=TRAINED | trained)
    predict_time(chosen, record, RATES, samples=160)
    return on_disk(record)["estimate"]


def test_memory_on_the_cpu_is_that_of_the_node(record):
    predict_memory(options(), record)
    noted = on_disk(record)
    assert noted["estimate"]["gpu_mib"] is None and noted["missing"]["estimate.gpu_mib"] == "no GPU"
    # of 231,296 parameters 16 bytes, logits and activations; the rest is Python
    assert 100 < noted["estimate"]["node_mib"] < 4 * GIB / 2**20
    assert noted["estimate"]["step"] is None and noted["missing"]["estimate.step"]


def test_a_larger_batch_needs_more_on_the_cpu_too(record):
    predict_memory(options(), record)
    small = on_disk(record)["estimate"]["node_mib"]
    predict_memory(options("--per_device_train_batch_size", "64"), record)
    logits = 60 * 64 * 2048 * 8 / 2**20
    assert on_disk(record)["estimate"]["node_mib"] - small > logits


def test_a_step_has_its_parts_and_what_they_were_computed_from(record):
    estimate = predicted(record)
    step = estimate["step"]
    assert step["seconds"] == pytest.approx(step["compute"] + step["optimizer"], rel=1e-3)
    assert step["samples_per_second"] == pytest.approx(16 / step["seconds"], rel=1e-3)
    assert (step["communication"], step["hidden"]) == (0, 0)
    assert estimate["rates"] == {"matmul_tflops": 0.2, "memory_gb_per_s": 10.0, "bus_gb_per_s": None}
    assert on_disk(record)["missing"].keys() == {"estimate.gpu_mib", "estimate.rates.bus_gb_per_s"}


def test_a_step_is_predicted_for_sequences_as_long_as_they_were(record, monkeypatch):
    batches = []
    real = prediction.predict_step

    def note(options, rates, batch):
        batches.append(batch)
        return real(options, rates, batch)

    monkeypatch.setattr(prediction, "predict_step", note)
    predicted(record)
    assert [(batch.size, batch.length, batch.counted) for batch in batches] == [(4, 40, 80)]


def test_whatever_goes_wrong_is_a_reason_in_the_record(record, monkeypatch):
    def fail(*_):
        raise RuntimeError("nothing works\nat all")

    monkeypatch.setattr(prediction, "predict_step", fail)
    estimate = predicted(record)
    assert estimate["step"] is None and estimate["node_mib"] > 0
    assert on_disk(record)["missing"]["estimate.step"] == "nothing works"
    monkeypatch.setattr(prediction, "estimate", fail)
    assert predicted(record) is None
    assert on_disk(record)["missing"]["estimate"] == "nothing works"


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        (["--optim", "adafactor"], "estimate", "--optim: the state of adafactor is not known here; "),
        (["--torch_compile"], "estimate.step", "--torch_compile: joins operations, and how fast they are is not known"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(record, flags, name, reason):
    predicted(record, *flags)
    assert on_disk(record)["missing"][name].startswith(reason)


def test_the_bandwidth_test_of_the_job_is_not_repeated(record, monkeypatch):
    cpu = torch.device("cpu")
    assert bus_bandwidth(record, cpu) is None, "one rank has nobody to talk to"
    monkeypatch.setenv("WORLD_SIZE", "2")
    record.content["bandwidth"] = {"bus_bandwidth_gb_per_s": 25.0}
    assert bus_bandwidth(record, cpu) == 25e9
    monkeypatch.setattr(prediction.measure_bandwidth, "DEVICE", "cuda")
    assert bus_bandwidth(record, cpu) is None, "a training on the CPU beside GPUs"


def test_a_run_that_was_stopped_before_its_first_step_has_a_reason(record):
    chosen = options()
    predict_memory(chosen, record)
    record.update(train=TRAINED)
    predict_time(chosen, record, RATES, samples=0)
    assert on_disk(record)["missing"]["estimate.step"] == "no step was done"


def test_other_ranks_write_nothing(record, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    predict_memory(options(), record)
    assert not record.path.exists() and "estimate" not in record.content


def test_the_record_of_a_run_says_what_it_holds():
    text = (REPOSITORY / "scripts" / "training" / "record.py").read_text()
    for name in (*prediction.RATES, "estimate", "node_mib", "gpu_mib"):
        assert name in text
