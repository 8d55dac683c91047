"""The breakdown of a step, from events in the form of PyTorch's profiler."""

from dataclasses import dataclass

from torch.profiler import DeviceType

from training.profiling import PHASES, STEP, breakdown, table

SECOND = 10**9
FOURTH = f"{STEP}3"  # the profiler counts steps from 0


@dataclass
class Event:
    """An event like torch._C._profiler._KinetoEvent. start and duration are in seconds."""

    label: str
    start: float
    duration: float
    on_cpu: bool = True

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return round(self.start * SECOND)

    def duration_ns(self) -> int:
        return round(self.duration * SECOND)

    def device_type(self):
        return DeviceType.CPU if self.on_cpu else DeviceType.CUDA

    def is_user_annotation(self) -> bool:
        return self.label in (FOURTH, *PHASES)


def test_on_a_gpu_kernels_count_and_annotations_do_not(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    events = [
        Event(FOURTH, 0, 10),
        Event(FOURTH, 0, 10, on_cpu=False),
        Event("data", 0, 0),
        Event("forward", 0, 4),
        Event("forward", 0, 4, on_cpu=False),
        Event("gemm", 0, 4, on_cpu=False),
        Event("backward", 4, 6),
        Event("backward", 4, 6, on_cpu=False),
        Event("gemm", 4, 4, on_cpu=False),
        Event("ncclDevKernel_AllReduce", 6, 4, on_cpu=False),  # two of four seconds overlap with the product
    ]
    found = breakdown(events)
    assert (found["forward"], found["backward"]) == (4, 4)
    assert (found["communication"], found["hidden_communication"]) == (2, 2)
    assert found["kernels_per_micro_batch"] == 1  # the products; the first one is outside of the backward phase


def test_each_moment_of_a_step_counts_once():
    events = [
        Event(FOURTH, -5, 15),
        Event("aten::mm", -4, 1),  # belongs to an evaluation after the third step
        Event("data", 0, 1),
        Event("forward", 1, 2),
        Event("aten::mm", 1, 2),
        Event("backward", 3, 5),
        Event("aten::mm", 3, 3),
        Event("gloo:all_reduce", 5, 3),  # one of three seconds overlaps with the product
        Event("optimizer", 8, 1),
        Event("aten::add_", 8, 1),
        Event("gloo:all_reduce", 11, 3),  # after the step
    ]
    found = breakdown(events)
    assert found == {
        "steps": 1,
        "seconds_per_step": 10,
        "data": 1,
        "forward": 2,
        "backward": 3,
        "optimizer": 1,
        "communication": 2,
        "other": 1,
        "hidden_communication": 1,
    }


def test_deepspeeds_step_in_the_backward_pass_counts_as_optimizer():
    events = [
        Event(FOURTH, 0, 4),
        Event("data", 0, 0),
        Event("backward", 0, 4),
        Event("optimizer", 3, 1),
        Event("aten::mm", 0, 4),
    ]
    found = breakdown(events)
    assert (found["backward"], found["optimizer"], found["other"]) == (3, 1, 0)


def test_the_table_has_a_column_for_each_rank():
    one = breakdown([Event(FOURTH, 0, 4), Event("data", 0, 0), Event("forward", 0, 3)]) | {
        "trace": "profile/7/rank_0.json.gz"
    }
    lines = table([one, one]).splitlines()
    assert lines[1].split() == ["profile", "of", "a", "step", "rank", "0", "rank", "1"]
    assert lines[3].split() == ["forward", *("3000.0", "ms", "75", "%") * 2]
    assert lines[-1] == "traces: profile/7; open them in https://ui.perfetto.dev"
