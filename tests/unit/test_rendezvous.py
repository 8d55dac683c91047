"""How the nodes of a job find each other: the first node's address, and what launch.py says when they do not."""

import socket
from argparse import Namespace

import psutil
import pytest

import launch
from job import rendezvous
from parallel.distributed import free_port

# rendezvous.py


class Route:
    """A socket of a machine on which each target is reached from another address of its own."""

    own = {"10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1", "fe80::2": "fe80::1", "127.0.1.1": "127.0.0.1", "::1": "::1"}

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        if address[0] not in self.own:
            raise OSError("no route")
        self.target = address[0]

    def getsockname(self):
        return (self.own[self.target], 40000)


@pytest.mark.parametrize(
    ("resolved", "address"),
    [
        (["10.0.0.2"], "10.0.0.1"),
        (["fd00::2", "10.0.0.2"], "10.0.0.1"),
        (["fd00::2"], "fd00::1"),
        (["127.0.1.1", "10.0.0.2"], "10.0.0.1"),
        (["127.0.1.1"], ""),
        (["::1", "fe80::2"], ""),
        (["10.9.9.9", "fd00::2"], "fd00::1"),
        (["10.9.9.9"], ""),
    ],
    ids=["IPv4", "IPv4 first", "IPv6 only", "not loopback", "only loopback", "nothing usable", "no route", "no way"],
)
def test_own_address_is_the_one_on_the_way_to_another_node(monkeypatch, resolved, address):
    def entry(found):
        return (socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found, 9))

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry(found) for found in resolved])
    monkeypatch.setattr(socket, "socket", Route)
    assert rendezvous.address_towards("node2") == address


def test_a_name_without_an_address_leads_nowhere():
    assert rendezvous.address_towards("") == ""
    assert rendezvous.address_towards("no-such-node.invalid") == ""


def test_slurms_address_of_a_node_goes_before_its_name(monkeypatch):
    slurm, ways = {"node2": "10.0.0.2", "node3": ""}, {"10.0.0.2": "10.0.0.1", "node2": "10.1.0.1", "node3": "10.3.0.1"}
    monkeypatch.setattr(rendezvous, "slurm_address", slurm.get)
    monkeypatch.setattr(rendezvous, "address_towards", lambda target: ways.get(target, ""))
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.0.0.1"
    del ways["10.0.0.2"]
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.1.0.1"
    del ways["node2"]
    assert rendezvous.first_node_address(["node2", "node3"]) == "10.3.0.1"
    ways.clear()
    assert rendezvous.first_node_address(["node2", "node3"]) == ""


def test_the_interface_is_the_one_with_that_address(monkeypatch):
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.0.7", "fd00::7"], "ib0": ["10.0.0.1"]}
    found = {name: [Namespace(address=address) for address in addresses] for name, addresses in found.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    for own, name in (("10.0.0.1", "ib0"), ("fd00::7", "eth0"), ("172.16.0.1", ""), ("", "")):
        monkeypatch.setattr(rendezvous, "address_towards", lambda _, own=own: own)
        assert rendezvous.interface_towards("10.0.0.1") == name


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
