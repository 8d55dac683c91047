"""Checkpoints, and what somebody may have put into one of their files to have it executed."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.distributed.checkpoint import filesystem

from training.safe_load import METADATA, load_weights_only, refuse_foreign_code

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
EXECUTED = Path("executed")


class Code:
    """Unpickled, it creates a folder: a harmless stand-in for any code."""

    def __reduce__(self):
        return os.mkdir, (str(EXECUTED),)


@pytest.fixture(autouse=True)
def weights_only(monkeypatch):
    """As train.py loads; undone after the test. Nothing may have been executed in it."""
    monkeypatch.setattr(filesystem, "pickle", pickle)
    allowed = torch.serialization.get_safe_globals()
    load_weights_only(with_deepspeed=True)
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    assert not EXECUTED.exists()


FILES = [
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth"),
    *("pytorch_model.bin", "pytorch_model_fsdp.bin", "optimizer.bin"),
    *("global_step8/mp_rank_00_model_states.pt", "global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
]
FORMATS = {
    "torch": lambda path: torch.save({"module": Code()}, path),
    "old torch": lambda path: torch.save(Code(), path, _use_new_zipfile_serialization=False),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Code(), protocol=2)),
    "new pickle": lambda path: path.write_bytes(pickle.dumps(Code())),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", FORMATS)
def test_a_file_that_holds_code_is_refused_by_name(name, how, refusal):
    path = Path("checkpoint-8") / name
    path.parent.mkdir(parents=True)
    FORMATS[how](path)
    what = "is damaged, or no file of a checkpoint" if how == "new pickle" else "holds posix.mkdir, which is code"
    assert refusal(refuse_foreign_code, Path("checkpoint-8"), code=4).startswith(f"error: {path}: {what}")


def test_the_code_of_these_tests_does_run_where_nothing_forbids_it(monkeypatch):
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    for how, write in FORMATS.items():
        write(Path("x.pt"))
        with open("x.pt", "rb") as file:
            pickle.load(file) if "pickle" in how else torch.load("x.pt", weights_only=False)
        EXECUTED.rmdir()


def test_a_damaged_file_is_refused_too(refusal):
    Path("checkpoint-8").mkdir()
    path = Path("checkpoint-8/optimizer.pt")
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:1000])
    assert refusal(refuse_foreign_code, path.parent, code=4).startswith(f"error: {path}: is damaged, or no file")


# What is loaded in spite of it, if a file changes in between


def test_nothing_in_this_process_loads_code(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    load_weights_only(with_deepspeed=True)
    torch.save({"module": Code()}, "x.pt")
    for load in (TorchCheckpointEngine().load, lambda path: torch.load(path, weights_only=False), torch.load):
        with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
            load("x.pt")


def test_deepspeeds_own_classes_are_loaded():
    scalers = [LossScaler(2.0), DynamicLossScaler(2.0**16, 1000, 1, 2, False)]
    state = {"loss_scaler": scalers, "zero_stage": ZeroStageEnum.gradients, "slices": fragment_address(8, 0)}
    Path("checkpoint-8").mkdir()
    torch.save(state, "checkpoint-8/optim_states.pt")
    refuse_foreign_code(Path("checkpoint-8"))
    loaded = TorchCheckpointEngine().load("checkpoint-8/optim_states.pt")
    assert [scaler.cur_scale for scaler in loaded["loss_scaler"]] == [2.0, 2.0**16]
    assert (loaded["zero_stage"], loaded["slices"]) == (ZeroStageEnum.gradients, fragment_address(8, 0))


# A sharded checkpoint of FSDP


def sharded(value: object) -> Path:
    folder = Path("checkpoint-8/optimizer_0")
    dcp.save({"exp_avg": torch.ones(4, dtype=torch.bfloat16), "lr": value}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_sharded_checkpoint_is_accepted_and_loaded():
    folder = sharded(0.1)
    refuse_foreign_code(folder.parent)
    found = {"exp_avg": torch.zeros(4, dtype=torch.bfloat16), "lr": 0.0}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert (found["lr"], found["exp_avg"].sum()) == (0.1, 4)


def test_code_among_the_values_of_a_shard_is_refused(refusal):
    folder = sharded(Code())
    line = refusal(refuse_foreign_code, folder.parent, code=4)
    assert line.startswith(f"error: {folder}/__0_0.distcp: holds posix.mkdir, which is code and no data; ")
    with pytest.raises(dcp.api.CheckpointException, match=r"posix\.mkdir"):
        dcp.load({"exp_avg": torch.zeros(4, dtype=torch.bfloat16), "lr": 0.0}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("how", ["instead", "inside"])
def test_code_in_the_metadata_is_refused(refusal, how):
    path = sharded(0.1) / METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Code()
    path.write_bytes(pickle.dumps(Code() if how == "instead" else metadata))
    line = refusal(refuse_foreign_code, path.parent.parent, code=4)
    assert line.startswith(f"error: {path}: holds posix.mkdir, which is code and no data; ")
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        dcp.FileSystemReader(path.parent).read_metadata()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(1), pickle.dumps({"storage_data": {}})])
def test_metadata_of_another_kind_is_refused(refusal, content):
    path = sharded(0.1) / METADATA
    path.write_bytes(content)
    assert refusal(refuse_foreign_code, path.parent.parent, code=4).startswith(f"error: {path}: is damaged, or no")


def test_a_shard_that_is_gone_is_named(refusal):
    folder = sharded(0.1)
    shutil.move(folder / "__0_0.distcp", "elsewhere")
    line = refusal(refuse_foreign_code, folder.parent, code=4)
    assert line.startswith(f"error: {folder}/__0_0.distcp: cannot be read (No such file or directory); ")
