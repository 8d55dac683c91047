"""Put tests/ on the import path for `helpers`, and group the tests that one pytest worker must run together.

`make test` runs the training runs in three workers. Each worker creates its own session fixtures, so all files that use
the table of runs go to one worker, all files that use the cluster go to another, and all files that use the web site go
to another. No other file is split. The two largest groups begin first, so that all workers end at about the same time.
(pytest-xdist's own mark for this, xdist_group, has no effect with pytest 9.)
"""

import functools
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from workbench import Server

TESTS = Path(__file__).parent
# Programs cache the matrix speed that they measure. A busy machine's speed must not get into the user's own cache.
CACHE = tempfile.TemporaryDirectory(prefix="cache-of-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name
# A shell script starts a process in the background with SIGINT ignored, and all processes of the tests would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", action="store_true", help="list the promises of the pages with their tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--promises"):
        tests: dict[str, set[str]] = {}
        for item in items:
            for promise in [promise for mark in item.iter_markers("promise") for promise in mark.args]:
                tests.setdefault(promise, set()).add(item.nodeid.partition("[")[0])
        for promise in sorted(tests):
            print(promise, *sorted(tests[promise]), sep="\n    ")
        items.clear()
    first = ["cluster", "table", str(TESTS / "integration/test_rehearse.py")]  # the longest groups
    items.sort(key=lambda item: first.index(group) if (group := group_of(item.nodeid)) in first else len(first))


def group_of(nodeid: str) -> str:
    """Return the name of the group of tests that must run on the same worker."""
    return group_of_file(TESTS.parent / nodeid.split("::")[0])


@functools.cache
def group_of_file(path: Path) -> str:
    if path.parent.name == "slurm":
        return "cluster"
    if path.parent.name == "integration" and re.search(r"@uses\(|\btable\)", path.read_text()):
        return "table"
    if path.name in ("test_site.py", "test_slides.py", "test_what_fits.py"):
        return "site"
    return str(path)


class OneWorkerPerFixture(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    return OneWorkerPerFixture(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """The server.py process, which has imported PyTorch and forks once per training."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()
