"""Puts tests/ on the path, for `helpers`, and says which tests one of several pytest workers must run together.

`make test` has three workers for the trainings. Fixtures of a session are made anew in each worker, so one gets all
files that use the table of runs, one all that use the cluster, and the third each other file as a whole. (The
marks of pytest-xdist for this, xdist_group, have no effect with pytest 9.)
"""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from bench import Server

TESTS = Path(__file__).parent
# What a busy machine reaches in products of matrices is not to stay in the user's cache
CACHE = tempfile.TemporaryDirectory(prefix="cache-of-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name


class OneWorkerPerFixture(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = TESTS.parent / nodeid.split("::")[0]
        if path.parent.name == "slurm":
            return "cluster"
        if path.parent.name == "integration" and re.search(r"@uses\(|\btable\)", path.read_text()):
            return "table"
        return str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    return OneWorkerPerFixture(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """The process that has imported PyTorch and forks for each training: server.py."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()
