"""Tests of measure_bandwidth.py on simulated networks. Only the simulated collectives advance the clock."""

import pytest
import torch

import measure_bandwidth
from measure_bandwidth import Size, bus_bandwidth, measure, measure_sizes, table

KIB, MIB, GIB = 2**10, 2**20, 2**30


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


@pytest.fixture
def connect(monkeypatch):
    """``connect(speed, latency)`` connects 16 ranks by a network, and returns it."""

    def connect_16_ranks(speed: float, latency: float) -> Network:
        network = Network(speed, 16, latency)
        monkeypatch.setenv("WORLD_SIZE", "16")
        monkeypatch.setattr(measure_bandwidth.dist, "all_reduce", network.all_reduce)
        monkeypatch.setattr(measure_bandwidth.dist, "barrier", network.barrier)
        monkeypatch.setattr(measure_bandwidth.time, "perf_counter", lambda: network.now)
        return network

    return connect_16_ranks


# Bus bandwidth in GB/s, latency in seconds. Many nodes have the last latency: 25 GB/s transfer 250 MB in this time
@pytest.mark.parametrize(("speed", "latency"), [(0.0005, 1e-4), (1.25, 1e-4), (400, 1e-4), (25, 0.01)])
def test_the_measurement_ends_within_a_minute_and_is_right(connect, monkeypatch, speed, latency):
    """The test uses the settings for GPUs: 50 iterations and a message of 4 GiB, which needs no memory on `meta`."""
    network = connect(speed, latency)
    monkeypatch.setattr(measure_bandwidth, "ITERATIONS", 50)
    part, iterations, seconds = measure(torch.empty(GIB, device="meta"))
    assert network.now < 60
    assert bus_bandwidth(seconds, part.nbytes, 16) == pytest.approx(speed, rel=0.05), (
        "the latency may change the result by 5 %"
    )
    assert ((part.nbytes, iterations) == (4 * GIB, 50)) == (speed > 10), (
        "only a slow network gets a smaller measurement"
    )


@pytest.mark.parametrize(
    ("speed", "latency", "largest"),
    [(0.0005, 1e-4, 256 * KIB), (1.25, 1e-4, GIB // 2), (400, 1e-4, GIB), (25, 0.01, GIB)],
)
def test_the_sizes_are_measured_within_a_minute_and_show_latency_and_bandwidth(
    connect, monkeypatch, speed, latency, largest
):
    network = connect(speed, latency)
    monkeypatch.setattr(measure_bandwidth, "LARGEST_BYTES", GIB)
    sizes = measure_sizes(torch.empty(GIB // 4, device="meta"))
    assert network.now < 60
    assert [size.message_bytes for size in sizes] == [32 * KIB * 2**i for i in range(len(sizes))]
    assert sizes[-1].message_bytes == largest, "a slow network ends the measurement earlier"
    assert ("larger messages are left out" in "\n".join(table(sizes))) == (largest < GIB)
    for size in sizes:
        transfer = size.message_bytes * 2 * 15 / 16 / speed / 1e9
        # The barrier at the end takes one more latency
        assert size.seconds == pytest.approx(transfer + 1.5 * latency, abs=0.51 * latency, rel=0)


SIZES = [Size(512 * KIB, 0.001, 0.5), Size(MIB, 0.00125, 0.8), Size(2 * MIB, 0.002, 1.2), Size(4 * MIB, 0.004, 1.0)]


def test_the_table_names_the_message_that_reaches_the_plateau(monkeypatch):
    """In this curve a message of 2 MiB is the fastest, and 256 KiB is fast by chance: a CPU's cache may hold it."""
    monkeypatch.setattr(measure_bandwidth, "LARGEST_BYTES", 4 * MIB)
    assert table([Size(256 * KIB, 0.0002, 1.1), *SIZES]) == [
        "  message   time (ms)   bus bandwidth (GB/s)",
        "  256 KiB       0.200                    1.1",
        "  512 KiB       1.000                    0.5",
        "    1 MiB       1.250                    0.8",
        "    2 MiB       2.000                    1.2",
        "    4 MiB       4.000                      1",
        "from 2 MiB on, every message reaches at least 90 % of the last bandwidth",
    ]
