"""Print MASTER_ADDR and MASTER_PORT for job.sh: the address of this node, which is the first, and a free port.

    PYTHONPATH=scripts python -m job.master_address 4711            # one node: 127.0.0.1 and the port
    PYTHONPATH=scripts python -m job.master_address 4711 node2      # the address of this node on the route to node2

The address is this node's numeric address on the route to another node. The host name would not work: on many machines
it means loopback (Debian writes "127.0.1.1 host" into /etc/hosts), and the other nodes would connect to themselves.
"""

import argparse
import socket

from distributed.rendezvous import free_port
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program


def address_towards(node: str) -> str:
    """Return this machine's address on the route to a node. Raises WorkshopError (exit code 3) if there is no route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]  # any port works
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # this chooses a route without sending anything
            return probe.getsockname()[0]
    except OSError as error:
        what = f"{socket.gethostname()} has no address on the way to {node} ({error})"
        remedy = "set it to the first node's address (ip -brief address shows it there)"
        raise WorkshopError("MASTER_ADDR", what, remedy, ENVIRONMENT) from error


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job_id")
    parser.add_argument("node", nargs="?", help="another node of the job")
    arguments = parser.parse_args()
    address = address_towards(arguments.node) if arguments.node else "127.0.0.1"
    print(address, free_port(arguments.job_id))


if __name__ == "__main__":
    run_program(main)
