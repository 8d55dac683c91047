"""The table of runs: each is executed once per session, and examined by as many tests as need it.

A test names its run with ``@uses("zero2-2")`` and gets it as the argument `run`; other runs of the table come
from `table("plain")`. Two runs at a time are executed ahead of the tests that wait for them.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import Process, make_workplace, start
from runs import RUNS


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> Path:
    """The directory in which all runs of this session are started."""
    folder = make_workplace(tmp_path_factory.mktemp("runs") / "work place")  # with a space, as users have them
    sizes = {"model_type": "bloom", "vocab_size": 32768, "hidden_size": 512, "n_layer": 11, "n_head": 8}
    (folder / "bloom-50m").mkdir()
    (folder / "bloom-50m" / "config.json").write_text(json.dumps(sizes | {"use_cache": False}))
    return folder


@pytest.fixture(scope="session")
def table(workplace, request):
    """``table(name)`` is the `helpers.Finished` of that run, which must have ended with exit code 0."""
    started: dict[str, Process] = {}
    pool = ThreadPoolExecutor(max_workers=2)

    def execute(name: str):
        started[name] = RUNS[name].start(workplace, name)
        return started[name].wait()

    futures = {name: pool.submit(execute, name) for name in dict.fromkeys(runs_of(request.session))}

    def result(name: str):
        if name not in futures:
            futures[name] = pool.submit(execute, name)
        finished = futures[name].result()
        assert finished.code == 0, f"run {name} of the table failed\n{finished}"
        return finished

    yield result
    pool.shutdown(wait=False, cancel_futures=True)
    for process in started.values():
        process.kill()
    pool.shutdown()


def runs_of(session: pytest.Session) -> list[str]:
    """Names of the runs that the selected tests use, in the order of the tests."""
    names = [getattr(getattr(item, "callspec", None), "params", {}).get("run") for item in session.items]
    names = [name for name in names if name in RUNS]
    return ["plain", *names] if names else []  # most are compared with the plain run


@pytest.fixture
def run(request, table):
    return table(request.param)


@pytest.fixture
def background(workplace):
    """Like `helpers.start`, for processes that must not outlive the test."""
    processes = []

    def start_here(*arguments, **options) -> Process:
        processes.append(start(workplace, *arguments, **options))
        return processes[-1]

    yield start_here
    for process in processes:
        process.kill()
