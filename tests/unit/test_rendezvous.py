"""How the nodes of a job find each other: the first node's address, and what launch.py says when they do not."""

import socket

import pytest

import launch
from job import rendezvous
from parallel.distributed import free_port

# rendezvous.py


def test_the_port_differs_from_job_to_job_and_skips_one_that_is_taken():
    first = rendezvous.port_of("4711")
    assert 20000 <= first < 32768, "above, Linux gives ports to any connection"
    assert first != rendezvous.port_of("4712")
    with socket.socket() as listener:
        listener.bind(("", first))
        assert rendezvous.port_of("4711") == first + 1


def test_an_address_comes_from_the_way_to_another_node(refusal):
    assert rendezvous.address_towards("127.0.0.1") == "127.0.0.1"
    line = refusal(rendezvous.address_towards, "no-such-node.invalid", code=3)
    assert " has no address on the way to no-such-node.invalid (" in line


# launch.py


def test_the_time_out_is_that_of_the_static_rendezvous(monkeypatch, main_of):
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)
    monkeypatch.setenv("JOIN_TIMEOUT", "7")
    flags = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "x.py"]
    main_of(launch, *flags)
    assert seen[0].rdzv_conf == "timeout=7"


def test_a_malformed_time_out_is_refused(monkeypatch, main_of, refusal):
    monkeypatch.setenv("JOIN_TIMEOUT", "soon")
    line = refusal(main_of, launch, "--nproc-per-node=1", "x.py")
    assert line == "error: JOIN_TIMEOUT: is 'soon', not a whole number; unset it, or give a whole number"


@pytest.mark.parametrize("backend", ["c10d", "etcd", "etcd-v2"])
@pytest.mark.parametrize("by_variable", [False, True], ids=["flag", "variable"])
def test_only_the_static_rendezvous_is_accepted(monkeypatch, main_of, refusal, backend, by_variable):
    monkeypatch.setattr(launch, "run", lambda _: pytest.fail("it was started"))
    words = ["x.py"] if by_variable else [f"--rdzv-backend={backend}", "x.py"]
    if by_variable:
        monkeypatch.setenv("PET_RDZV_BACKEND", backend)
    what = f"{backend} may execute what anybody on the network writes into its store"
    way_out = "leave it out, and give several nodes --master-addr, --master-port and --node-rank"
    assert refusal(main_of, launch, *words) == f"error: --rdzv-backend: {what}; {way_out}"


@pytest.mark.parametrize("flags", [[], ["--standalone"], ["--nnodes=1:1"]], ids=lambda flags: str(flags))
def test_one_node_meets_on_loopback_where_torchrun_would_take_c10d(monkeypatch, main_of, flags):
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)
    main_of(launch, *flags, "x.py")
    (arguments,) = seen
    assert (arguments.rdzv_backend, arguments.standalone, arguments.master_addr) == ("static", False, "127.0.0.1")
    assert arguments.master_port > 0
