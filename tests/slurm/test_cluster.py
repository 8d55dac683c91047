"""Tests of the test cluster: jobs are scheduled, run and cancelled, nodes crash, and no process or file is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from breakable_cluster import BreakableCluster, remains
from cluster import ClusterError
from helpers import REPOSITORY

HERE = Path(__file__).parent


def test_a_new_cluster_removes_the_cluster_of_a_dead_owner(cluster):
    script = (
        "import os, signal, sys; from breakable_cluster import BreakableCluster\n"
        "BreakableCluster(sys.argv[1], nodes=1, owner=os.getpid()).up(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    orphan, next_one = f"{cluster.state}c", BreakableCluster(f"{cluster.state}d", nodes=1)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}/scripts"}
    killed = subprocess.run([sys.executable, "-c", script, orphan], cwd=HERE, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(remains(orphan)) > 5
    next_one.up()
    next_one.down()
    next_one.down()  # has no effect on a cluster that is down
    assert remains(orphan) == remains(next_one.state) == []
    assert cluster.exec("node1", ["hostname"]).stdout == "node1\n"  # this cluster's owner is alive


def test_a_foreign_directory_is_left_alone(cluster, tmp_path):
    (tmp_path / "precious").touch()
    link = Path(f"{cluster.state}e")
    os.rename(tmp_path, link)
    try:
        with pytest.raises(ClusterError, match="holds other files"):
            BreakableCluster(link).up()
        BreakableCluster(link).down()
        assert (link / "precious").exists()
    finally:
        os.rename(link, tmp_path)
