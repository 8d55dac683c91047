"""Fixtures of the unit tests. They hide the variables, caches and GPUs of the machine, and forbid processes."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config import DataArguments, ModelArguments

# pytest finds these fixtures by their names
from fixtures import clean_machine, main_of, refusal, sample  # noqa: F401
from helpers import REPOSITORY
from shared.units import MIB

# The fixtures import the libraries, because the process that starts the workers loads this file and runs no test


@pytest.fixture(scope="session", autouse=True)
def libraries(tmp_path_factory):
    """Import the libraries before any test, and use a datasets cache that is removed after the session."""
    import datasets
    import matplotlib.font_manager  # noqa: F401 - it may start fc-list to build its cache
    import torch

    torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Fail a test that starts a process, even if the tested code treats the error as a missing program."""
    started = []

    def refuse(command: object, *_, **__):
        started.append(command)
        raise FileNotFoundError(f"a unit test must not start a process: {command}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    yield
    assert not started, f"{started}: move this test to tests/commands, or replace the process by its output"


@pytest.fixture
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def local_zone(request):
    """Use the time zone that the test names, in the format of the variable TZ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def size_of_python(monkeypatch):
    """Fix the size of a Python process, because measurements of two processes differ a little."""
    from estimate import memory, predict_from_record

    python = memory.MemoryPart("Python, libraries", 0, 433 * MIB, from_start=True)
    monkeypatch.setattr(memory, "measure_python", lambda: python)
    monkeypatch.setattr(predict_from_record, "measure_python_elsewhere", lambda: python)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """The tokenizer of tiny-bloom. It is trained on the sample and has 2,048 tokens."""
    from model import load_tokenizer

    data = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
    return load_tokenizer(ModelArguments("tiny-bloom"), data)


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with bf16 for the code that chooses the precision."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


@pytest.fixture
def written() -> Callable[..., str]:
    """Return a function that writes a file into the working directory and returns its name. A list is JSON Lines."""
    import data_loader

    data_loader.read_files.cache_clear()  # another test may have had a file of the same name

    def write(content: Any, name: str = "") -> str:
        path = Path(name or ("t.jsonl" if isinstance(content, list) else "my.json"))
        path.parent.mkdir(exist_ok=True)
        if not isinstance(content, str | bytes):
            rows = content if isinstance(content, list) else [content]
            content = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write
