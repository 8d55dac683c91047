"""Tests of runs that would differ from the request: they end before the first step.

test_strategies.py checks the audit of correct runs, and tests/unit/test_audit.py checks each knob.
"""

import json
from pathlib import Path

import pytest

from helpers import REPOSITORY

FEW = {"TRAIN_SIZE": 8, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
# PyTorch pins no memory without a GPU, so this patch only copies a tensor. Tensors with the copy's storage count as
# pinned.
PINNING = """
from guard import audit
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
kept = {}
def pin_memory(self, tensor, make_copy=True, match_shape=True):
    copy = tensor.clone()
    kept[copy.untyped_storage().data_ptr()] = copy
    return copy
CPU_Accelerator.pin_memory = pin_memory
CPU_Accelerator.is_pinned = lambda self, tensor: tensor.untyped_storage().data_ptr() in kept
audit.can_pin = lambda: True
"""
ZERO2_PINNED = "ds_configs/zero2_cpu_offload_pinned_memory.json"
# Flags, a patch that breaks the run, and the text of the error line
BROKEN = {
    "batch": (
        ("--deepspeed", "ds_configs/zero1.json"),
        "from guard import audit\naudit.effective_batch = lambda trainer, engine: (4, 1, 1)",
        "gradient accumulation: 2 was requested, 1 is what would run;",
    ),
    "ddp_instead_of_fsdp": (
        ("--fsdp",),
        "from guard import run_frame\nrun_frame.shard_on_cpu = lambda: None",
        "strategy: FSDP2 FULL_SHARD was requested, DDP is what would run;",
    ),
    "blocks_not_wrapped": (
        ("--fsdp",),
        "import accelerate.utils.fsdp_utils as fsdp\nfsdp.fsdp2_prepare_auto_wrap_policy = lambda *arguments: None",
        "FSDP units: 2 blocks was requested, 0 blocks is what would run;",
    ),
    "parameters_not_sharded": (
        ("--fsdp",),
        "from distributed import inspect_fsdp\ninspect_fsdp.local_fraction = lambda model: 0.8",
        "local parameter share: 1.0 was requested, 0.8 is what would run;",
    ),
    "not_pinned": (
        ("--deepspeed", ZERO2_PINNED),
        f"{PINNING}CPU_Accelerator.is_pinned = lambda self, tensor: False",
        "optimizer pinned memory: True was requested, False is what would run;",
    ),
}


@pytest.mark.promise("what was asked for is what runs")
@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_differs_from_the_request_is_stopped(train, name: str):
    flags, patch, error = BROKEN[name]
    stopped = train(name, *flags, patch=patch, code=3)
    assert stopped.error == f"knob audit: {error} correct the flag or the config"
    assert (stopped.record["status"], stopped.record["exit_code"]) == ("failed", 3)
    assert not stopped.record.get("eval"), "the run must end before its first step"
    assert not list(stopped.output.rglob("*.safetensors"))


@pytest.mark.parametrize(("stage", "pin"), [(2, True), (3, False)])
def test_pinned_memory_is_checked_on_the_right_buffers(train, workplace, stage: int, pin: bool):
    config = json.loads((REPOSITORY / "ds_configs" / f"zero{stage}_cpu_offload.json").read_text())
    for section in ("offload_optimizer", "offload_param"):
        if section in config["zero_optimization"]:
            config["zero_optimization"][section]["pin_memory"] = pin
    # A byte order mark, as PowerShell writes it: transformers gets the content, because it cannot read such a file
    (workplace / f"pin_{stage}.json").write_text(json.dumps(config), encoding="utf-8-sig")
    done = train(f"pin_{stage}", "--deepspeed", f"pin_{stage}.json", patch=PINNING, **FEW)
    knobs = done.record["knobs"]
    assert knobs["optimizer pinned memory"] == {"requested": pin, "effective": pin}
    assert "Adam's moments never are" in done.log
    if stage == 3:
        assert knobs["parameter pinned memory"] == {"requested": pin, "effective": True}
        assert "DeepSpeed always pins them" in done.log


AS_ON_GPUS = """
import torch
from distributed.fsdp_config import shard_on_cpu
from training import trainer

make = trainer.WorkshopTrainer.__init__


def make_as_on_gpus(*arguments, **options):
    shard_on_cpu()  # sets accelerate's distributed_type to MULTI_GPU
    make(*arguments, **options)


class OnTheCPU(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, output_device, **options):
        super().__init__(module, **options)


torch.nn.parallel.DistributedDataParallel = OnTheCPU
trainer.WorkshopTrainer.__init__ = make_as_on_gpus
"""


def test_ddp_on_one_gpu_is_only_a_warning(train):
    """accelerate wraps a model in DDP only for two or more GPUs, but always on the CPU."""
    done = train("ddp_on_one", patch=AS_ON_GPUS, ranks=1, **FEW)
    assert done.record["knobs"]["strategy"] == {"requested": "DDP", "effective": "plain"}


def test_inspection_of_a_model_wrapped_by_fsdp1(train):
    """Training with FSDP1 needs a GPU, so the test only wraps and inspects a model."""
    done = train("fsdp1", script=Path(__file__).with_name("fsdp1_wrap.py"), ranks=2)
    (line,) = [line for line in done.log.splitlines() if line.startswith("seen ")]
    assert json.loads(line.removeprefix("seen ")) == {
        "blocks": 3,
        "sharded": 3,
        "others": ["CustomGPTForCausalLM"],
        "share": 0.5,
        "name": "FSDP1 FULL_SHARD",
        "mesh": "1 x 2",
        "offloaded": False,
        "parameters": 7984,
        "generates": True,
    }
