"""Fixtures that the conftest.py files of tests/unit, tests/commands and tests/integration import by name."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from config import KNOBS
from helpers import REPOSITORY, the_error
from settings.hints import UNREAD_VARIABLES, WARNED_VARIABLES
from shared.errors import WorkshopError

LAUNCHER_VARIABLES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_ID", "EXPERIMENT"),
    *("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "BANDWIDTH_FILE", "REQUIRE_GPU", "GPU_MEMORY"),
    *("all_proxy", "ALL_PROXY", "SBATCH_MEM_PER_NODE", "JOIN_TIMEOUT", "MIN_BANDWIDTH"),
]


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch, tmp_path):
    """Change to an empty directory and unset every variable that a script reads; restore everything afterwards."""
    slurm = [name for name in os.environ if name.startswith("SLURM_")]
    variables = [knob.variable for knob in KNOBS]
    for name in (*variables, *UNREAD_VARIABLES, *WARNED_VARIABLES, *LAUNCHER_VARIABLES, *slurm):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Call a function that must raise a WorkshopError with exit code 2 (or `code`), and return its error line."""

    def check(function: Callable, *arguments: object, code: int = 2) -> str:
        with pytest.raises(WorkshopError) as raised:
            function(*arguments)
        assert raised.value.code == code
        return the_error(f"error: {raised.value}")

    return check


@pytest.fixture
def main_of(monkeypatch) -> Callable[..., None]:
    """Return a function that runs the `main` of a script in this process, as its command line would."""

    def run(script: ModuleType, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        script.main()

    return run


@pytest.fixture
def sample() -> Path:
    return REPOSITORY / "data" / "squad_sample.json"
