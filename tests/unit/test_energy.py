"""Tests of a GPU's energy counter and activity, on a stub for NVML with its real structures and return codes."""

import math
from types import SimpleNamespace

import pynvml
import pytest

from measure import energy, gpu_activity
from measure.energy import EnergyMeter
from measure.gpu_activity import GpuActivityMeter
from records.writer import RunRecord
from shared.nvml import power_limit_w
from stub_nvml import WATTS, StubNvml, use_stub

SHARED = "several ranks share a GPU, and its counter does not separate them"
MIG = "the GPU is divided (MIG), and its counter does not separate the parts"
NO_COUNTER = "NVML has no energy counter of this GPU"
KWH_IN_A_MINUTE = 2 * WATTS * 60 / 3.6e6  # energy of the second GPU


class Gpu:
    """A GPU on a simulated clock."""

    def __init__(self, monkeypatch):
        self.now = 5000.0
        self.patch = monkeypatch

    def start(self, uuid: str = "GPU-1", **stub: object) -> None:
        use_stub(StubNvml(("GPU-0", "GPU-1"), clock=lambda: self.now, **stub), uuid, self.patch.setattr)
        self.patch.setattr(gpu_activity, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def other_rank(monkeypatch, *values: object) -> None:
    """Let a second rank take part with these values in the next collectives of the energy meter."""
    monkeypatch.setattr(energy, "gather_lists", lambda own: [own, list(values)])


@pytest.mark.promise("energy adds up over stops, and is empty with a reason where it cannot be known")
def test_each_rank_counts_the_joules_of_its_own_gpu(gpu, monkeypatch):
    gpu.start()
    other_rank(monkeypatch, "", "GPU-0")
    meter = EnergyMeter()
    before = meter.joules()
    gpu.now += 60
    assert meter.reason == ""
    assert meter.joules() - before == 60 * 2 * WATTS
    other_rank(monkeypatch, 3000.0)
    record = RunRecord("7", "output/7")
    record.update(energy={})
    record.earlier_kwh = 1.5
    meter.record_kwh(record)
    assert record.content["energy"]["kwh"] == round(KWH_IN_A_MINUTE + 3000 / 3.6e6 + 1.5, 6)
    assert power_limit_w() == 300
    record.earlier_kwh = math.nan  # an earlier attempt was killed
    meter.record_kwh(record)
    assert record.reasons["energy.kwh"] == "an earlier attempt ended before it recorded its energy"


UNKNOWN = {
    "shared": ({}, "GPU-1", SHARED),
    "divided": ({"mig": True}, "GPU-1", MIG),
    "older than Volta": (
        {"errors": {"nvmlDeviceGetTotalEnergyConsumption": pynvml.NVML_ERROR_NOT_SUPPORTED}},
        "GPU-1",
        f"{NO_COUNTER} (Not Supported)",
    ),
    "unknown to NVML": ({}, "GPU-9", f"{NO_COUNTER} (Not Found)"),
    "no NVML": ({"errors": {"nvmlInitWithFlags": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, "GPU-1", f"{NO_COUNTER} (NVML"),
}


@pytest.mark.promise("energy adds up over stops, and is empty with a reason where it cannot be known")
@pytest.mark.parametrize(("stub", "uuid", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_energy_that_nobody_can_know_is_empty_with_its_reason(stub, uuid, reason, gpu, monkeypatch):
    gpu.start(uuid, **stub)
    if reason == SHARED:
        other_rank(monkeypatch, "", "GPU-1")
    meter = EnergyMeter()
    assert meter.reason.startswith(reason)
    assert math.isnan(meter.joules())


def test_all_ranks_give_the_reason_of_the_rank_without_a_counter(gpu, monkeypatch):
    gpu.start()
    other_rank(monkeypatch, MIG, "")
    assert EnergyMeter().reason == MIG


LOST = {"errors": {"nvmlDeviceGetTotalEnergyConsumption": pynvml.NVML_ERROR_GPU_IS_LOST}}


@pytest.mark.parametrize(("seconds", "stub"), [(60, LOST), (-60, {})], ids=["fails", "goes back"])
def test_a_counter_that_fails_or_goes_back_does_not_end_the_training(seconds, stub, gpu):
    gpu.start()
    meter = EnergyMeter()
    before = meter.joules()
    gpu.now += seconds
    gpu.start(**stub)
    assert math.isnan(meter.joules() - before), "the energy of a steady step"
    gpu.now += 600
    record = RunRecord("7", "output/7")
    record.update(energy={})
    meter.record_kwh(record)
    assert math.isnan(record.content["energy"]["kwh"])
    assert record.reasons["energy.kwh"] == "NVML's counter failed or went back"


# Activity


def measure(gpu: Gpu, seconds: list[float], pauses: tuple[int, ...], epochs: tuple[int, ...], **stub: object) -> tuple:
    """Run steps of these durations. Return the recorded activity and the reason if it is missing.

    pauses: numbers of the steps after which the run evaluates for 1000 s. epochs: numbers of the steps after which it
    does so at the end of an epoch. The first step belongs to the warm-up.
    """
    gpu.start(**stub)
    speed = SimpleNamespace(started=None)
    record = RunRecord("7", "output/7")
    activity = GpuActivityMeter(speed)
    for number, duration in enumerate(seconds):
        if number:
            speed.started = gpu.now
        activity.begin_step()
        gpu.now += duration
        if number in pauses:
            speed.started = None
        activity.end_step()
        if number in epochs:
            speed.started = None
            activity.pause()
        gpu.now += 1000 * (number in (*pauses, *epochs))
    activity.write(record)
    return record.content["gpu_activity"], record.reasons.get("gpu_activity")


MEASURED = {"sm_percent": 81.2, "tensor_percent": 30.5, "dram_percent": 44.0}
SHORT = "less than 0.1 s of steady steps in a row"
OLD = "this GPU does not count it; Hopper and newer GPUs do"
DENIED = {"errors": {f"metric {pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL}": pynvml.NVML_ERROR_NO_PERMISSION}}
NOT_A_NUMBER = {"values": {pynvml.NVML_GPM_METRIC_SM_UTIL: math.nan}}
ACTIVITIES = {
    "one step": ([60, 0.5, 9], (), (), {}, 0.5, None),
    "short steps": ([60, 0.06, 0.06, 9], (), (), {}, 0.12, None),
    "an evaluation between short steps": ([60, 0.06, 0.06, 0.3], (1, 2), (), {}, 0.3, None),
    "an end of an epoch between short steps": ([60, 0.06, 0.06, 0.3], (), (1, 2), {}, 0.3, None),
    "only warm-up": ([60], (), (), {}, None, SHORT),
    "only short steps": ([60, 0.06, 0.06], (1,), (), {}, None, SHORT),
    "older than Hopper": ([60, 1], (), (), {"gpm": False}, None, OLD),
    "not allowed": ([60, 1], (), (), DENIED, None, "NVML: Insufficient Permissions"),
    "no number": ([60, 1], (), (), NOT_A_NUMBER, None, "NVML: Unknown Error"),
}


@pytest.mark.parametrize(
    ("steps", "pauses", "epochs", "stub", "seconds", "reason"), ACTIVITIES.values(), ids=ACTIVITIES
)
def test_activity_is_measured_over_steady_steps_or_has_a_reason(gpu, steps, pauses, epochs, stub, seconds, reason):
    expected = [{"seconds": seconds, **MEASURED}] if seconds else None
    assert measure(gpu, steps, pauses, epochs, **stub) == (expected, reason)
