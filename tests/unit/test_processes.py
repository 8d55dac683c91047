"""Ranks from Slurm's variables, GPUs of ranks, and the error line that a job prints once.

tests/integration/test_launchers.py starts ranks with each launcher.
"""

import os

import pytest

from distributed import process_group
from distributed.process_group import prepare_environment
from shared import before_imports
from shared.errors import WorkshopError


def test_one_task_under_srun_gets_no_process_group(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    prepare_environment(shards=False)
    assert "RANK" not in os.environ


def test_threads_wait_as_before_where_there_is_a_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(before_imports, "GPU_DRIVERS", (str(tmp_path),))
    before_imports.prepare_imports()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides the GPU
    before_imports.prepare_imports()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_attention_does_not_use_cudnn_on_a_gpu(monkeypatch, gpu):
    """cuDNN would make a new plan for each shape of a batch."""
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(process_group.torch.cuda, "set_device", lambda number: None)
    before = process_group.torch.backends.cuda.cudnn_sdp_enabled()
    try:
        process_group.torch.backends.cuda.enable_cudnn_sdp(True)
        process_group.bind_device()
        assert not process_group.torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        process_group.torch.backends.cuda.enable_cudnn_sdp(before)


def bound_task(monkeypatch, **variables: str) -> list[int]:
    """Simulate the second of two tasks on a node, each of which sees one GPU. Return a list of the GPUs it chooses."""
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(process_group.torch.cuda, "set_device", chosen.append)
    for name, value in ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    return chosen


def test_a_task_that_is_bound_to_one_gpu_uses_this_gpu(monkeypatch):
    chosen = bound_task(monkeypatch, SLURM_GPUS_ON_NODE="2")
    process_group.bind_device()
    assert chosen == [0]
    assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed computes on cuda:LOCAL_RANK"


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_GPUS_ON_NODE": "1"}, {"SLURM_GPUS_ON_NODE": "2", "TORCHELASTIC_RUN_ID": "1"}],
    ids=["no Slurm", "one GPU for two tasks", "ranks of one torchrun"],
)
def test_two_ranks_do_not_take_the_same_gpu(monkeypatch, refusal, variables):
    chosen = bound_task(monkeypatch, **variables)
    assert "without GPU binding" in refusal(process_group.bind_device, code=3)
    assert chosen == []


@pytest.fixture
def shared_gpus(monkeypatch):
    """Bind a rank of four on a node with some GPUs. Return the GPU that it chooses."""

    def bind(rank: int, gpus: int, allowed: int) -> int:
        chosen = []
        monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(process_group.torch.cuda, "set_device", chosen.append)
        for name in ("NCCL_HOSTID", "NCCL_NET"):
            monkeypatch.delenv(name, raising=False)
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "RANKS_PER_GPU": allowed}
        for name, value in world.items():
            monkeypatch.setenv(name, str(value))
        process_group.bind_device()
        return chosen[0]

    return bind


@pytest.mark.parametrize(
    ("gpus", "allowed", "chosen"), [(1, 4, [0, 0, 0, 0]), (2, 2, [0, 1, 0, 1]), (2, 4, [0, 1, 0, 1])]
)
def test_ranks_share_gpus_if_the_site_allows_it(shared_gpus, gpus, allowed, chosen):
    hosts = set()
    for rank, gpu in enumerate(chosen):
        assert shared_gpus(rank, gpus, allowed) == gpu
        assert os.environ["LOCAL_RANK"] == str(gpu), "DeepSpeed computes on cuda:LOCAL_RANK"
        assert os.environ["RANKS_PER_GPU"] == str(4 // gpus)
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 4, "NCCL refuses two ranks of a host on one GPU"


def test_ranks_with_a_gpu_each_do_not_share(shared_gpus):
    assert [shared_gpus(rank, gpus=4, allowed=4) for rank in range(4)] == [0, 1, 2, 3]
    assert "NCCL_HOSTID" not in os.environ and os.environ["RANKS_PER_GPU"] == "1"


def test_more_ranks_than_may_share_end_with_a_line_that_names_the_number(shared_gpus, refusal):
    line = refusal(lambda: shared_gpus(3, gpus=1, allowed=2), code=3)
    assert line.startswith("error: LOCAL_RANK: 3, but this process sees 1 of the GPUs of ")
    assert "let ranks share a GPU (RANKS_PER_GPU=4 before the command)" in line


def test_error_of_several_lines_is_printed_as_one():
    assert str(WorkshopError("a\nb", "c\nd", "\x1b[2J")) == "a b: c d;  [2J"
