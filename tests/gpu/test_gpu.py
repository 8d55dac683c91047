"""What only a GPU can show: fp16, pinned memory, and peaks of GPU memory. Tiny runs, one GPU."""

import os
from pathlib import Path

import pytest
import torch
from helpers import Finished, make_workplace, run
from torch.utils.cpp_extension import CUDA_HOME

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU here")
needs_nvcc = pytest.mark.skipif(
    torch.cuda.is_available() and CUDA_HOME is None,
    reason="DeepSpeed compiles its CPU optimizer with nvcc, which is not here",
)
FIRST_GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("gpu") / "work")


def train(workplace: Path, name: str, *arguments: str, **variables: object) -> Finished:
    options = {"CUDA_VISIBLE_DEVICES": FIRST_GPU, "FP16": "", "EM_F1": "True", "EVAL_SIZE": 10} | variables
    return run(workplace, name, *arguments, **options)


def check(finished: Finished, strategy: str) -> None:
    record = finished.record
    assert record["status"] == "completed"
    assert record["hardware"]["gpus"] == 1
    assert finished.effective("device") == "cuda:0"
    assert record["knobs"]["precision"] == {"requested": "fp16", "effective": "fp16"}
    assert finished.effective("strategy") == strategy
    assert 0 < finished.losses[1] < finished.losses[0] < 7.7, "log(2048) is 7.62, what an untrained model has"
    (peak,) = record["peak_gpu_memory"]
    assert 0 < peak["allocated_mib"] <= peak["reserved_mib"]
    assert list(finished.output.glob("*.safetensors"))


def test_plain_fp16(workplace):
    plain = train(workplace, "plain")
    check(plain, "plain")


@needs_nvcc
def test_zero2_offload_in_pinned_memory(workplace):
    pinned = train(workplace, "zero2", "--deepspeed", "ds_configs/zero2_cpu_offload_pinned_memory.json")
    check(pinned, "DeepSpeed ZeRO-2")
    assert pinned.effective("optimizer offload") == "cpu"
    assert pinned.record["knobs"]["optimizer pinned memory"] == {"requested": True, "effective": True}
    assert "  Device: cuda:0\n" in pinned.log


@needs_nvcc
def test_zero3_offload(workplace):
    offloaded = train(workplace, "zero3", "--deepspeed", "ds_configs/ds_zero3_offload.json")
    check(offloaded, "DeepSpeed ZeRO-3")
    assert (offloaded.effective("optimizer offload"), offloaded.effective("parameter offload")) == ("cpu", "cpu")
    assert offloaded.effective("optimizer pinned memory") is True
    assert offloaded.effective("parameter pinned memory") is True
