"""Tests with a GPU that a run cannot or must not use: an old driver, one GPU for two ranks, --use_cpu.

tests/gpu_stub replaces the GPU. test_demo.py runs the demo on such a machine.
"""

import pytest

from helpers import REPOSITORY

FEW = ("--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no")


@pytest.fixture
def on_gpu_machine(train):
    """Run train.py as a new process, because the stub must be on PYTHONPATH when PyTorch is imported."""

    def run(gpu: str, job_id: str, *words: object, **options: object):
        stub = {"STUB_GPU": gpu, "PYTHONPATH": REPOSITORY / "tests/gpu_stub"}
        return train(job_id, *words, *FEW, **stub | {"CUDA_VISIBLE_DEVICES": "0"} | options)

    return run


@pytest.mark.promise("a machine with one GPU, or with a driver that is too old, is a normal machine")
def test_a_gpu_with_too_old_a_driver_is_not_used(on_gpu_machine):
    """The import of DeepSpeed makes torch.cuda count the GPU that the driver lists."""
    finished = on_gpu_machine("old_driver", "old_driver", "--deepspeed", "ds_configs/zero1.json")
    assert finished.record["hardware"]["gpus"] == 0


@pytest.mark.promise("a machine with one GPU, or with a driver that is too old, is a normal machine")
def test_two_ranks_on_one_gpu_get_an_error_that_names_use_cpu(on_gpu_machine):
    finished = on_gpu_machine("one", "second_rank", FP16="", LOCAL_RANK=1, code=3)
    (line,) = finished.error_lines
    assert line.startswith("error: LOCAL_RANK: 1, but this process sees 1 of the GPUs of ")
    assert line.endswith("or train on the CPU: CUDA_VISIBLE_DEVICES= before the command")


def test_use_cpu_never_starts_cuda(on_gpu_machine):
    finished = on_gpu_machine("one", "use_cpu", "--use_cpu", REQUIRE_GPU="1")
    assert finished.record["hardware"]["gpus"] == 0
    assert "the stub for CUDA was started" not in finished.log


SHARED = """
from measure import speed
from training import trainer

speed.ranks_per_gpu = trainer.ranks_per_gpu = lambda: 2
"""


def test_ranks_that_share_a_gpu_have_no_speed(train):
    """The stub cannot compute, so this training on the CPU is only told that its ranks share a GPU."""
    run = train("shared", "--max_steps", "6", patch=SHARED)
    assert "_per_second" not in run.log
    rates = [name for name, value in run.record["train"].items() if "per_second" in name or name == "mfu_percent"]
    assert [run.record["train"][name] for name in rates] == [None] * 6
    assert run.record["missing"]["train.steady_samples_per_second"].startswith("ranks share a GPU (RANKS_PER_GPU)")
    assert run.record["train"]["loss_mean"] > 0
