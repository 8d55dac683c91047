"""Where the nodes of a job meet: the first node's address as the others reach it, and the interface to it. For job.sh.

    PYTHONPATH=scripts python -m job.rendezvous address node2 node3      # on node1: its address on the way to them
    PYTHONPATH=scripts python -m job.rendezvous interface 10.0.0.1    # the interface on the way there, or nothing

A machine's own name is no help: on many it means loopback (Debian writes "127.0.1.1 host" into /etc/hosts), and the
other nodes would be told to look for the first one on themselves. The route to another node knows the address.
"""

import argparse
import contextlib
import ipaddress
import re
import socket
import subprocess

from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program

ANY_PORT = 9


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("address", "interface"))
    parser.add_argument("targets", nargs="+", help="the other nodes, for address; one address, for interface")
    arguments = parser.parse_args()
    if arguments.what == "interface":
        print(interface_towards(arguments.targets[0]))
    elif address := first_node_address(arguments.targets):
        print(address)
    else:
        what = f"{socket.gethostname()} has no address but loopback on the way to {', '.join(arguments.targets)}"
        raise WorkshopError(
            "MASTER_ADDR", what, "set it to the first node's address (ip -brief address shows it there)", ENVIRONMENT
        )


def first_node_address(others: list[str]) -> str:
    """This node's address as the other nodes of the job reach it; "" if there is none."""
    for node in others:
        # Slurm's address of a node first: its name may be unknown here
        for target in (slurm_address(node), node):
            if address := address_towards(target):
                return address
    return ""


def slurm_address(node: str) -> str:
    """The address, or name, by which Slurm itself reaches a node; "" where it does not say."""
    command = ["scontrol", "show", "node", node]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else ""


def address_towards(target: str) -> str:
    """This machine's address on the way to `target`, as a number; "" for no way, or only loopback."""
    try:
        found = socket.getaddrinfo(target, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: chooses the route, and sends nothing
            own = probe.getsockname()[0]
            if usable(own):
                return own
    return ""


def usable(address: str) -> bool:
    """Whether other nodes can be given this address. IPv6's link-local ones mean nothing without an interface."""
    number = ipaddress.ip_address(address)
    return not (number.is_loopback or (number.version == 6 and number.is_link_local))


def interface_towards(target: str) -> str:
    """Name of the interface on the way to `target`, on that node itself the one that holds its address; or ""."""
    import psutil

    own = address_towards(target)
    if not own:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if own in [entry.address for entry in addresses]:
            return name
    return ""


if __name__ == "__main__":
    run_program(main)
