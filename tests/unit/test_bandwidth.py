"""Tests of measure_bandwidth.py on simulated networks. Only the simulated collectives advance the clock."""

import pytest
import torch

import measure_bandwidth
from measure_bandwidth import bus_bandwidth, measure, minimum_from_environment

GIB = 2**30


class Network:
    """A network whose clock advances by the latency and the transfer time of each all-reduce."""

    def __init__(self, bandwidth: float, ranks: int, latency: float):
        self.bandwidth = bandwidth
        self.ranks = ranks
        self.latency = latency
        self.now = 0.0
        self.connected: set[int] = set()

    def all_reduce(self, tensor: torch.Tensor, operation: object = torch.distributed.ReduceOp.SUM) -> None:
        is_message = tensor.dim() == 1
        assert not is_message or operation == torch.distributed.ReduceOp.SUM, "NVSwitches reduce fp32 only by SUM"
        self.now += self.latency + tensor.nbytes * 2 * (self.ranks - 1) / self.ranks / self.bandwidth / 1e9
        if tensor.nbytes not in self.connected:
            self.now += 0.5  # NCCL needs longer for the first message of each size
            self.connected.add(tensor.nbytes)

    def barrier(self) -> None:
        self.now += self.latency


@pytest.mark.parametrize(
    ("ranks", "expected"),
    # PERFORMANCE.md of nccl-tests: algbw = S/t, all-reduce busbw = algbw * 2*(n-1)/n. 4 GiB in 100 ms are 42.95 GB/s
    [(2, 42.94967), (8, 75.16193)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, expected):
    assert bus_bandwidth(0.1, 4 * GIB, ranks) == pytest.approx(expected, rel=1e-6)


# Bus bandwidth in GB/s, latency in seconds. Many nodes have the last latency: 25 GB/s transfer 250 MB in this time
@pytest.mark.parametrize(("speed", "latency"), [(0.0005, 1e-4), (1.25, 1e-4), (400, 1e-4), (25, 0.01)])
def test_the_measurement_ends_within_a_minute_and_is_right(monkeypatch, speed, latency):
    """The test uses the settings for GPUs: 50 iterations and a message of 4 GiB, which needs no memory on `meta`."""
    network = Network(speed, 16, latency)
    monkeypatch.setattr(measure_bandwidth, "ITERATIONS", 50)
    monkeypatch.setattr(measure_bandwidth.dist, "all_reduce", network.all_reduce)
    monkeypatch.setattr(measure_bandwidth.dist, "barrier", network.barrier)
    monkeypatch.setattr(measure_bandwidth.time, "perf_counter", lambda: network.now)
    part, iterations, seconds = measure(torch.empty(GIB, device="meta"))
    assert network.now < 60
    assert bus_bandwidth(seconds, part.nbytes, 16) == pytest.approx(speed, rel=0.05), (
        "the latency may change the result by 5 %"
    )
    assert ((part.nbytes, iterations) == (4 * GIB, 50)) == (speed > 10), (
        "only a slow network gets a smaller measurement"
    )


def test_a_malformed_threshold_is_refused(monkeypatch, refusal):
    monkeypatch.setenv("MIN_BANDWIDTH", "fast")
    assert refusal(minimum_from_environment).startswith("error: MIN_BANDWIDTH: 'fast' is not a number; give")
