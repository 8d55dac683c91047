"""Fixtures of the unit tests. No variable, cache or GPU of the machine gets into them, and nothing of theirs out."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch

import knobs
from errors import WorkshopError
from helpers import REPOSITORY, Finished

LAUNCHER_VARIABLES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_ID", "EXPERIMENT"),
    *("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "BANDWIDTH_FILE", "REQUIRE_GPU"),
]


torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other on a busy machine


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A datasets cache that ends with the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch, tmp_path):
    """An empty working directory, no GPU, and no variable that a script reads; all is put back afterwards."""
    slurm = [name for name in os.environ if name.startswith("SLURM_")]
    variables = [knob.variable for knob in knobs.KNOBS]
    for name in (*variables, *knobs.NEAR_MISSES, *LAUNCHER_VARIABLES, *slurm):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU, as far as the choice of the precision goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


def the_error(stderr: str) -> str:
    """The one error line, which must have its three parts; warnings of libraries may stand around it."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert re.fullmatch(r"error: \S.*: \S.*; \S.*", lines[0]), lines[0]
    return lines[0]


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Calls a function that must raise a WorkshopError of exit code 2 (or `code`), and gives its error line."""

    def check(function: Callable, *arguments: object, code: int = 2) -> str:
        with pytest.raises(WorkshopError) as raised:
            function(*arguments)
        assert raised.value.code == code
        return the_error(f"error: {raised.value}")

    return check


@pytest.fixture
def command(tmp_path) -> Callable[..., Finished]:
    """Runs a script as its own process in the empty directory `work`; `log` holds its stderr."""

    def run(script: str, *arguments: object, **variables: str) -> Finished:
        home = tmp_path / "home"
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
        environment = kept | {"HOME": str(home), "HF_HOME": str(home / "hf"), "CUDA_VISIBLE_DEVICES": ""} | variables
        program = [str(REPOSITORY / "scripts" / script)]
        if script.startswith("job."):  # as job.sh does
            program = ["-m", script]
            environment["PYTHONPATH"] = str(REPOSITORY / "scripts")
        words = [sys.executable, *program, *map(str, arguments)]
        folder = tmp_path / "work"
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        finished = Finished(" ".join(words), done.returncode, done.stderr, folder, "")
        finished.stdout = done.stdout
        return finished

    return run


@pytest.fixture
def sample() -> Path:
    return REPOSITORY / "data" / "squad_sample.json"
