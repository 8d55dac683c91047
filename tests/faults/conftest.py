"""The fixture `bench`: a `Bench` for each test case. A test case must leave no process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "commands"))  # the folder of shell.py

from workbench import Bench, Server


@pytest.fixture
def bench(server: Server, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(server, tmp_path / "work place")  # users' paths may hold a space
    yield bench
    left = bench.close()
    assert not left, f"processes outlived the case: {left}"
