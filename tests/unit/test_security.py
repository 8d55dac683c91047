"""The promises of SECURITY.md: models, datasets and checkpoints are data. tests/text_checks checks the scripts."""

import builtins
import os
import pickle
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from transformers import BloomConfig

from config import DataArguments, ModelArguments
from data_loader import read_part
from guard.checkpoints import find_fault, forbid_code_in_checkpoints
from helpers import REPOSITORY
from model import load_model
from shared.errors import WorkshopError

DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
EXECUTED = Path("executed")
WRITES = f"import pathlib\npathlib.Path({str(EXECUTED)!r}).mkdir()\n"


@pytest.fixture(autouse=True)
def never_executed(monkeypatch):
    """Disable the network, answer yes to every question, and check that no code was executed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    yield
    assert not EXECUTED.exists()


# Model folders


class Code:
    def __reduce__(self):
        return os.mkdir, (str(EXECUTED),)


def test_weights_that_hold_code_are_not_loaded(tiny_tokenizer, refusal):
    """tests/faults trains a model whose folder has code of its own."""
    BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2).save_pretrained("model")
    torch.save({"transformer.ln_f.weight": Code()}, "model/pytorch_model.bin")
    line = refusal(load_model, ModelArguments("model"), tiny_tokenizer, 1)
    assert line.startswith("error: --model_name: a file of model contains objects other than tensors, which are never")


# Data


@pytest.mark.promise("datasets run no code")
@pytest.mark.parametrize("dataset", ["mine", "mine/mine.py"])
def test_a_loading_script_is_not_a_dataset(dataset):
    Path("mine").mkdir()
    Path("mine/mine.py").write_text(WRITES)
    with pytest.raises((WorkshopError, RuntimeError)):
        read_part("train", DataArguments(dataset=dataset))


# Checkpoints. tests/integration/test_strategies.py resumes from the checkpoints of each strategy


@pytest.fixture
def weights_only():
    """Forbid code in checkpoints, as train.py does, and allow it again after the test."""
    allowed = torch.serialization.get_safe_globals()
    forbid_code_in_checkpoints(with_deepspeed=True)
    yield
    del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)


CODE, DAMAGED = "contains posix.mkdir, which is code, not data", "is damaged, or not a checkpoint file ("


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("rng_state_1.pth", None, CODE),
        ("optimizer.bin", None, CODE),
        ("global_step8/states.pt", None, CODE),
        ("optimizer.pt", pickle.dumps(Code()), DAMAGED),
        ("optimizer.pt", b"PK\3\4 cut off", DAMAGED),
    ],
)
def test_a_file_with_code_or_of_another_format_is_a_fault(weights_only, name, content, fault):
    path = Path("checkpoint-8") / name
    path.parent.mkdir(parents=True)
    torch.save({"module": Code()}, path)
    path.write_bytes(content or path.read_bytes())
    assert find_fault(path, {}, 8).startswith(fault)


@pytest.mark.promise("Security: checkpoints are data")
def test_nothing_in_this_process_loads_code(weights_only, monkeypatch):
    torch.save({"module": Code()}, "x.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    torch.load("x.pt", weights_only=False)
    EXECUTED.rmdir()  # without the prohibition, the code is executed
    forbid_code_in_checkpoints(with_deepspeed=True)
    for load in (TorchCheckpointEngine().load, lambda path: torch.load(path, weights_only=False), torch.load):
        with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
            load("x.pt")
