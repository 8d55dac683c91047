"""Fixtures of the unit tests, which start no process: no variable, cache or GPU of the machine gets into them."""

import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import datasets
import matplotlib.font_manager  # noqa: F401 - before any test: it starts fc-list where it has no cache yet
import pytest
import torch

from config import DataArguments, ModelArguments
from estimate import memory, predict_from_record

# pytest finds them by their names
from fixtures import clean_machine, refusal, sample  # noqa: F401
from helpers import REPOSITORY
from model import load_tokenizer
from shared.units import MIB

torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other on a busy machine


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A datasets cache that ends with the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """What keeps these tests fast; also in code that would take the failure for an absent program."""
    started = []

    def refuse(command: object, *_, **__):
        started.append(command)
        raise FileNotFoundError(f"tests/unit starts no process: {command}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    yield
    assert not started, f"{started}: move this test to tests/commands, or give the code what the process would print"


@pytest.fixture(autouse=True)
def size_of_python(monkeypatch):
    """One size for what two processes would each measure of themselves."""
    python = memory.MemoryPart("Python, libraries", 0, 433 * MIB, from_start=True)
    monkeypatch.setattr(memory, "measure_python", lambda: python)
    monkeypatch.setattr(predict_from_record, "measure_python_elsewhere", lambda: python)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """That of tiny-bloom, trained on the sample: 2,048 tokens."""
    data = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
    return load_tokenizer(ModelArguments("tiny-bloom"), data)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU, as far as the choice of the precision goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


@pytest.fixture
def main_of(monkeypatch) -> Callable[..., None]:
    """Runs the `main` of a script in this process, as its command line would."""

    def run(script: ModuleType, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        script.main()

    return run
