"""Checkpoints, and what somebody may have put into one of their files to have it executed. That each strategy's own
checkpoints are taken: tests/integration/test_strategies.py."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from training.safe_load import load_weights_only, refuse_foreign_code

EXECUTED = Path("executed")


class Code:
    """Unpickled, it creates a folder: a harmless stand-in for any code."""

    def __reduce__(self):
        return os.mkdir, (str(EXECUTED),)


@pytest.fixture(autouse=True)
def weights_only():
    """As train.py loads; undone after the test. Nothing may have been executed in it."""
    allowed = torch.serialization.get_safe_globals()
    load_weights_only(with_deepspeed=True)
    yield
    del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    assert not EXECUTED.exists()


@pytest.mark.parametrize("name", ["rng_state_1.pth", "optimizer.bin", "global_step8/states.pt"])
def test_a_file_that_holds_code_is_refused_by_name(name, refusal):
    path = Path("checkpoint-8") / name
    path.parent.mkdir(parents=True)
    torch.save({"module": Code()}, path)
    line = refusal(refuse_foreign_code, Path("checkpoint-8"), code=4)
    assert line.startswith(f"error: {path}: holds posix.mkdir, which is code and no data; ")


@pytest.mark.parametrize("content", [pickle.dumps(Code()), b"PK\3\4 cut off"])
def test_what_is_no_file_of_a_checkpoint_is_refused_too(content, refusal):
    Path("checkpoint-8").mkdir()
    Path("checkpoint-8/optimizer.pt").write_bytes(content)
    line = refusal(refuse_foreign_code, Path("checkpoint-8"), code=4)
    assert line.startswith("error: checkpoint-8/optimizer.pt: is damaged, or no file of a checkpoint (")


def test_nothing_in_this_process_loads_code(monkeypatch):
    torch.save({"module": Code()}, "x.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    torch.load("x.pt", weights_only=False)
    EXECUTED.rmdir()  # it runs where nothing forbids it
    load_weights_only(with_deepspeed=True)
    for load in (TorchCheckpointEngine().load, lambda path: torch.load(path, weights_only=False), torch.load):
        with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
            load("x.pt")
