"""How the nodes of a job find each other: the first node's address, and what launch.py says when they do not."""

import socket

import pytest

import launch
from distributed import rendezvous
from helpers import free_port

# rendezvous.py


def test_the_port_differs_from_job_to_job_and_skips_one_that_is_taken():
    first = rendezvous.free_port("4711")
    assert 20000 <= first < 32768, "above, Linux gives ports to any connection"
    assert first != rendezvous.free_port("4712")
    with socket.socket() as listener:
        listener.bind(("", first))
        assert rendezvous.free_port("4711") == first + 1


# launch.py


@pytest.fixture
def launched(monkeypatch, main_of):
    """What launch.py would give to torchrun."""
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)

    def start(*flags: str):
        main_of(launch, *flags, "x.py")
        return seen.pop()

    return start


def test_the_time_out_is_that_of_the_static_rendezvous(monkeypatch, launched):
    monkeypatch.setenv("JOIN_TIMEOUT", "7")
    started = launched("--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    assert started.rdzv_conf == "timeout=7"


@pytest.mark.parametrize(("flags", "variables"), [(["--rdzv-backend=c10d"], {}), ([], {"PET_RDZV_BACKEND": "c10d"})])
def test_only_the_static_rendezvous_is_accepted(monkeypatch, launched, refusal, flags, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    what = "c10d may execute code that anybody on the network writes into its store"
    way_out = "leave the flag out, and for several nodes give --master-addr, --master-port and --node-rank"
    assert refusal(launched, *flags) == f"error: --rdzv-backend: {what}; {way_out}"


@pytest.mark.parametrize("flags", [[], ["--standalone"]], ids=str)
def test_one_node_meets_on_loopback_where_torchrun_would_take_c10d(launched, flags):
    started = launched(*flags)
    assert (started.rdzv_backend, started.standalone, started.master_addr) == ("static", False, "127.0.0.1")
    assert started.master_port > 0
