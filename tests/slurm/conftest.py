"""The `cluster` fixture: two nodes of 8 GPUs and 64 CPUs under a real Slurm, brought up once per session.

It needs root on Debian or its like, and installs Slurm by apt-get if need be; elsewhere its tests are skipped
with the reason. A session that is killed leaves its cluster behind; the next session takes it down.
"""

import os

import pytest
from cluster import Cluster, unavailable


@pytest.fixture(scope="session")
def cluster():
    """A running `cluster.Cluster`; a test that crashes a node starts it again."""
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster here: {reason}")
    cluster = Cluster(f"/tmp/slurm-pytest-{os.getpid()}", owner=os.getpid())
    cluster.up()
    yield cluster
    cluster.down()
