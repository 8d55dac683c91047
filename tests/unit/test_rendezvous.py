"""The rendezvous of a job's nodes: its port, and the back ends that launch.py accepts."""

import socket

import pytest

import launch
from distributed import rendezvous

# rendezvous.py


def test_the_port_differs_between_jobs_and_skips_a_used_one():
    first = rendezvous.free_port("4711")
    assert 20000 <= first < 32768, "from 32768 on, Linux gives ports to any connection"
    assert first != rendezvous.free_port("4712")
    with socket.socket() as listener:
        listener.bind(("", first))
        assert rendezvous.free_port("4711") == first + 1


# launch.py


@pytest.fixture
def launched(monkeypatch, main_of):
    """Return a function that gives the arguments with which launch.py would start torchrun."""
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)

    def start(*flags: str):
        main_of(launch, *flags, "x.py")
        return seen.pop()

    return start


@pytest.mark.parametrize(("flags", "variables"), [(["--rdzv-backend=c10d"], {}), ([], {"PET_RDZV_BACKEND": "c10d"})])
def test_only_the_static_rendezvous_is_accepted(monkeypatch, launched, refusal, flags, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    what = "c10d may execute code that anybody on the network writes into its store"
    remedy = "leave the flag out, and for several nodes give --master-addr, --master-port and --node-rank"
    assert refusal(launched, *flags) == f"error: --rdzv-backend: {what}; {remedy}"


@pytest.mark.parametrize("flags", [[], ["--standalone"]], ids=str)
def test_one_node_uses_loopback_and_the_join_timeout_where_torchrun_would_use_c10d(monkeypatch, launched, flags):
    monkeypatch.setenv("JOIN_TIMEOUT", "7")
    started = launched(*flags)
    assert started.rdzv_conf == "timeout=7"
    assert (started.rdzv_backend, started.standalone, started.master_addr) == ("static", False, "127.0.0.1")
    assert started.master_port > 0
