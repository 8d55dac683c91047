"""measure_bandwidth.py on networks of any speed, with a clock that only the simulated all-reduce moves."""

import pytest
import torch

import measure_bandwidth
from measure_bandwidth import bus_bandwidth, measure, minimum_from_environment

GIB = 2**30
SPEEDS = [0.0005, 0.01, 0.125, 0.5, 1.25, 5, 25, 400]  # GB/s of bus bandwidth


class Network:
    """All-reduces that take `latency` and the time of their bytes, on a clock of their own."""

    def __init__(self, bandwidth: float, ranks: int):
        self.bandwidth = bandwidth
        self.ranks = ranks
        self.latency = 1e-4
        self.now = 0.0
        self.hiccups = [2.0]  # seconds, at the second message
        self.connected: set[int] = set()

    def all_reduce(self, tensor: torch.Tensor, operation: object) -> None:
        self.now += self.latency + tensor.nbytes * 2 * (self.ranks - 1) / self.ranks / self.bandwidth / 1e9
        if tensor.nbytes in self.connected and self.hiccups:
            self.now += self.hiccups.pop()
        if tensor.device.type == "meta" and tensor.nbytes not in self.connected:
            self.now += 0.5  # NCCL, at the first message of a size
            self.connected.add(tensor.nbytes)

    def barrier(self) -> None:
        self.now += self.latency


@pytest.fixture
def measured(monkeypatch):
    """Bytes, iterations and bandwidth that GPUs at such a network find; their message of 4 GiB needs no memory."""

    def on(network: Network) -> tuple[int, int, float]:
        monkeypatch.setattr(measure_bandwidth, "ITERATIONS", 50)
        monkeypatch.setattr(measure_bandwidth.dist, "all_reduce", network.all_reduce)
        monkeypatch.setattr(measure_bandwidth.dist, "barrier", network.barrier)
        monkeypatch.setattr(measure_bandwidth.time, "perf_counter", lambda: network.now)
        part, iterations, seconds = measure(torch.empty(GIB, device="meta"))
        return part.nbytes, iterations, bus_bandwidth(seconds, part.nbytes, network.ranks)

    return on


@pytest.mark.parametrize(
    ("ranks", "expected"),
    # nccl-tests, PERFORMANCE.md: algbw = S/t; all-reduce busbw = algbw * 2*(n-1)/n. 4 GiB in 100 ms: algbw 42.95 GB/s
    [(2, 42.94967), (4, 64.42451), (8, 75.16193), (16, 80.53064)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, expected):
    assert bus_bandwidth(0.1, 4 * GIB, ranks) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("speed", SPEEDS)
def test_it_ends_within_a_minute_with_the_right_figure(measured, speed, ranks):
    network = Network(speed, ranks)
    size, iterations, bandwidth = measured(network)
    assert network.now < 60
    assert bandwidth == pytest.approx(speed, rel=0.05), "latency and barriers count a little"
    assert ((size, iterations) == (4 * GIB, 50)) == (speed > 10), "less on a slow network only"


def test_latency_of_small_messages_is_not_taken_for_a_slow_network(measured):
    """Many nodes: 10 ms of latency, in which 25 GB/s would move 250 MB."""
    network = Network(25, 16)
    network.latency = 0.01
    assert measured(network)[:2] == (4 * GIB, 50)


def test_a_malformed_threshold_is_refused(monkeypatch, refusal):
    monkeypatch.setenv("MIN_BANDWIDTH", "fast")
    assert refusal(minimum_from_environment).startswith("error: MIN_BANDWIDTH: 'fast' is not a number; give")
