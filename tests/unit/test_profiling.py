"""The breakdown of a step, from events in the form of PyTorch's profiler."""

from dataclasses import dataclass

import pytest
from torch.profiler import DeviceType

from measure.profiling import PHASES, STEP, breakdown, table

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


BREAKDOWNS = {  # is there a GPU, the events, and what they must add up to
    "on a GPU kernels count, and annotations do not": (
        True,
        [
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
        ],
        # the kernels are the products; the first one is outside of the backward phase
        {"forward": 4, "backward": 4, "communication": 2, "hidden_communication": 2, "kernels_per_micro_batch": 1},
    ),
    "each moment of a step counts once": (
        False,
        [
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
        ],
        {"steps": 1, "seconds_per_step": 10, "data": 1, "forward": 2, "backward": 3, "optimizer": 1}
        | {"communication": 2, "other": 1, "hidden_communication": 1},
    ),
    "DeepSpeed's step in the backward pass counts as optimizer": (
        False,
        [
            Event(FOURTH, 0, 4),
            Event("data", 0, 0),
            Event("backward", 0, 4),
            Event("optimizer", 3, 1),
            Event("aten::mm", 0, 4),
        ],
        {"backward": 3, "optimizer": 1, "other": 0},
    ),
}


@pytest.mark.parametrize(("gpu", "events", "expected"), BREAKDOWNS.values(), ids=BREAKDOWNS)
def test_the_breakdown_of_a_step(monkeypatch, gpu, events, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert expected.items() <= breakdown(events).items()


def test_the_table_has_a_column_for_each_rank():
    one = breakdown([Event(FOURTH, 0, 4), Event("data", 0, 0), Event("forward", 0, 3)]) | {
        "trace": "profile/7/rank_0.json.gz"
    }
    lines = table([one, one]).splitlines()
    assert lines[1].split() == ["profile", "of", "a", "step", "rank", "0", "rank", "1"]
    assert lines[3].split() == ["forward", *("3000.0", "ms", "75", "%") * 2]
    assert lines[-1] == "traces: profile/7; open them in https://ui.perfetto.dev"
