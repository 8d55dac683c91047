"""The `cluster` fixture: two nodes with 8 GPUs and 64 CPUs under a real Slurm, started once per session.

It needs root and Debian's Slurm. Otherwise the tests are skipped with the reason. The next session removes the cluster
of a killed session.
"""

import os
from collections.abc import Callable, Iterator

import pytest

from breakable_cluster import BreakableCluster, unavailable
from jobs import TRAININGS, Job, Lab


@pytest.fixture(scope="session")
def cluster():
    """A running `BreakableCluster`. A test that crashes a node must start the node again."""
    yield from running_cluster(nodes=2)


def running_cluster(nodes: int) -> Iterator[BreakableCluster]:
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster here: {reason}")
    cluster = BreakableCluster(f"/tmp/slurm-pytest-{os.getpid()}-{nodes}", nodes=nodes, owner=os.getpid())
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def lab(cluster, tmp_path_factory) -> Lab:
    """A copy of the repository whose experiments are submitted to the cluster."""
    return Lab(tmp_path_factory.mktemp("jobs"), cluster)


@pytest.fixture
def editable_lab(cluster, tmp_path) -> Lab:
    """A copy of the repository that a test may edit."""
    return Lab(tmp_path, cluster)


@pytest.fixture(scope="session")
def undisturbed(lab) -> Callable[[str], Job]:
    """``undisturbed(name)`` returns a job of `TRAININGS` that has run to its end without a disturbance."""
    done: dict[str, Job] = {}

    def job(name: str) -> Job:
        if name not in done:
            experiment, flags, knobs = TRAININGS[name]
            done[name] = lab.submit(experiment, *flags, **knobs).wait()
        return done[name]

    return job
