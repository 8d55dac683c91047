"""measure_bandwidth.py on networks of any speed, with a clock that only the simulated all-reduce moves."""

import argparse
import math

import pytest
import torch

import measure_bandwidth
from measure_bandwidth import Plan, bus_bandwidth, choose_plan, minimum_from_environment

GIB = 2**30
ON_GPUS = Plan(4 * GIB, 20, 50)
SPEEDS = [0.0005, 0.01, 0.05, 0.125, 0.5, 1.25, 3, 5, 12.5, 25, 100, 400]  # GB/s of bus bandwidth


@pytest.fixture
def gpus(monkeypatch):
    """The defaults of a machine with GPUs."""
    for name, value in (("MESSAGE_BYTES", 4 * GIB), ("WARM_UP", 20), ("ITERATIONS", 50)):
        monkeypatch.setattr(measure_bandwidth, name, value)


class Network:
    """All-reduces that take `latency` and the time of their bytes, on a clock of their own."""

    def __init__(self, bandwidth: float, ranks: int, latency: float, connecting: float):
        self.bandwidth, self.ranks, self.latency, self.connecting = bandwidth, ranks, latency, connecting
        self.now, self.sizes, self.connected = 0.0, [], set()

    def all_reduce(self, tensor: torch.Tensor, op: object = None) -> None:
        self.now += self.latency + tensor.nbytes * 2 * (self.ranks - 1) / self.ranks / self.bandwidth / 1e9
        if tensor.device.type == "meta" and tensor.nbytes not in self.connected:
            self.now += self.connecting  # NCCL, at the first message of a size
            self.connected.add(tensor.nbytes)
        self.sizes.append(tensor.nbytes)

    def barrier(self) -> None:
        self.now += self.latency


@pytest.fixture
def network(monkeypatch):
    """Puts this process at such a network; its message of 4 GiB needs no memory."""

    def make(bandwidth: float, ranks: int = 2, latency: float = 0.0, connecting: float = 0.0) -> Network:
        made = Network(bandwidth, ranks, latency, connecting)
        monkeypatch.setattr(measure_bandwidth.dist, "all_reduce", made.all_reduce)
        monkeypatch.setattr(measure_bandwidth.dist, "barrier", made.barrier)
        monkeypatch.setattr(measure_bandwidth.time, "perf_counter", lambda: made.now)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return made

    return make


def measured(network: Network, minimum: float = 5.0, **given: int) -> tuple[Plan, float]:
    """Plan and bandwidth of the whole test, probe included."""
    arguments = argparse.Namespace(message_bytes=None, warm_up=None, iterations=None, min_bandwidth=minimum)
    vars(arguments).update(given)
    size = arguments.message_bytes or measure_bandwidth.MESSAGE_BYTES
    message = torch.empty(size // 4, device="meta")
    plan = measure_bandwidth.plan_of_all_ranks(message, arguments)
    message = message[: plan.message_bytes // 4]
    seconds = measure_bandwidth.seconds_per_all_reduce(message, plan.warm_up, plan.iterations)
    return plan, bus_bandwidth(seconds, plan.message_bytes, network.ranks)


# The choice


@pytest.mark.parametrize(
    ("ranks", "expected"),
    # nccl-tests, PERFORMANCE.md: algbw = S/t; all-reduce busbw = algbw * 2*(n-1)/n. 4 GiB in 100 ms: algbw 42.95 GB/s
    [(2, 42.94967), (4, 64.42451), (8, 75.16193), (16, 80.53064)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, expected):
    assert bus_bandwidth(0.1, 4 * GIB, ranks) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("budget", [5, 50])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_plan_keeps_to_its_budget_and_wastes_little_of_it(gpus, speed, budget):
    seconds_per_byte = 1 / (speed * 1e9)
    plan = choose_plan(seconds_per_byte, budget)
    planned = (plan.warm_up + plan.iterations) * plan.message_bytes * seconds_per_byte
    assert planned <= budget
    assert plan == ON_GPUS or planned > budget * 0.4
    assert plan.warm_up >= 2 and plan.iterations >= 5
    assert plan.message_bytes == 4 * GIB or (plan.warm_up, plan.iterations) == (2, 5), "fewer before smaller"
    assert math.log2(plan.message_bytes).is_integer()


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (0.01, Plan(64 * 2**20, 2, 5)),
        (0.125, Plan(GIB // 2, 2, 5)),
        (1.25, Plan(4 * GIB, 4, 10)),
        (3, Plan(4 * GIB, 9, 24)),
        (25, ON_GPUS),
    ],
)
def test_plans_of_known_networks(gpus, speed, expected):
    """1 Gb/s and 10 Gb/s Ethernet; InfiniBand of 200 Gb/s."""
    assert choose_plan(1 / (speed * 1e9), 50) == expected


def test_the_message_is_never_smaller_than_that_of_the_probe(gpus):
    assert choose_plan(1.0, 50).message_bytes == measure_bandwidth.PROBE_BYTES


def test_what_is_given_stays(gpus):
    slow = 1 / 0.01e9
    assert choose_plan(slow, 50, 4 * GIB, 20, 50) == ON_GPUS
    assert choose_plan(slow, 50, message_bytes=4 * GIB) == Plan(4 * GIB, 2, 5)
    assert choose_plan(slow, 50, warm_up=0, iterations=1) == Plan(GIB // 4, 0, 1)
    assert choose_plan(slow, 50, iterations=100).iterations == 100
    assert choose_plan(1 / 100e9, 50, message_bytes=1000) == Plan(1000, 20, 50)


def test_on_the_cpu_messages_are_small(network):
    assert measured(network(1.0), minimum=0)[0] == Plan(4 * 2**20, 2, 5)


# The whole test


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("minimum", [0, 5])
@pytest.mark.parametrize("speed", SPEEDS)
def test_it_ends_within_a_minute_with_the_right_figure(gpus, network, speed, minimum, ranks):
    link = network(speed, ranks, latency=1e-4, connecting=0.5)
    _, bandwidth = measured(link, minimum)
    assert link.now < 60
    # latency and barriers count a little
    assert bandwidth == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize("speed", [12.5, 25, 400])
def test_on_a_fast_network_nothing_is_less(gpus, network, speed):
    assert measured(network(speed, latency=1e-3, connecting=0.5))[0] == ON_GPUS


@pytest.mark.parametrize("speed", [0.01, 0.125, 1, 2])
def test_far_below_the_minimum_is_said_at_once(gpus, network, speed):
    link = network(speed, latency=1e-3, connecting=0.5)
    plan, _ = measured(link)
    assert link.now < 15
    assert plan.message_bytes / (speed * 1e9) > 0.1, "long enough that latency does not count"
    patient = network(speed, latency=1e-3, connecting=0.5)
    measured(patient, minimum=0)
    assert patient.now > 15


def test_latency_of_small_messages_is_not_taken_for_a_slow_network(gpus, network):
    """Many nodes: 10 ms of latency, in which 25 GB/s would move 250 MB."""
    link = network(25, 16, latency=0.01)
    assert measured(link)[0] == ON_GPUS


def test_a_single_hiccup_decides_nothing(gpus, network, monkeypatch):
    link = network(25)
    smooth = link.all_reduce

    def hiccup(tensor, op=None):
        link.now += 2.0 if len(link.sizes) == 1 else 0
        smooth(tensor, op)

    monkeypatch.setattr(measure_bandwidth.dist, "all_reduce", hiccup)
    assert measured(link)[0] == ON_GPUS


def test_without_a_choice_there_is_no_probe(gpus, network):
    link = network(0.01)
    assert measured(link, message_bytes=2**20, warm_up=0, iterations=3)[0] == Plan(2**20, 0, 3)
    assert [size for size in link.sizes if size > 4] == [2**20] * 3


def test_all_ranks_follow_the_first(network, monkeypatch):
    other = Plan(2**20, 7, 7)
    monkeypatch.setattr(measure_bandwidth, "same_everywhere", lambda own: other)
    assert measured(network(1.0))[0] == other


def test_a_malformed_threshold_is_refused(monkeypatch, refusal):
    monkeypatch.setenv("MIN_BANDWIDTH", "fast")
    assert refusal(minimum_from_environment).startswith("error: MIN_BANDWIDTH: 'fast' is not a number; give")


@pytest.mark.parametrize(
    ("flag", "least"), [("--message_bytes=3", 4), ("--warm_up=-1", 0), ("--iterations=0", 1)], ids=str
)
def test_a_number_that_is_too_small_is_refused(main_of, refusal, flag, least):
    name, value = flag.split("=")
    line = refusal(main_of, measure_bandwidth, flag)
    assert line == f"error: {name}: {value} is too small; give at least {least}"
