"""What `pin_memory` rules, by what DeepSpeed asks its accelerator to pin: recorded here, as a CPU pins nothing."""

import json

import pytest

from helpers import REPOSITORY, patched, run

# A copy stands for the pinned memory; what shares its storage is pinned
RECORDER = """
from training import audit
import build_ops
build_ops.prepare_deepspeed()
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
FEW = {"TRAIN_SIZE": 8, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}


def config_file(folder, stage: int, pin: bool) -> str:
    config = json.loads((REPOSITORY / "ds_configs" / f"zero{stage}_cpu_offload.json").read_text())
    for section in ("offload_optimizer", "offload_param"):
        if section in config["zero_optimization"]:
            config["zero_optimization"][section]["pin_memory"] = pin
    path = folder / f"zero{stage}_{pin}.json"
    path.write_text(json.dumps(config))
    return path.name


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_is_judged_by_the_buffers_that_the_knob_rules(workplace, stage, pin):
    script, config = patched(workplace, "recorder", RECORDER), config_file(workplace, stage, pin)
    done = run(workplace, f"pin{stage}{pin}", "--deepspeed", config, script=script, **FEW)
    knobs = done.record["knobs"]
    assert knobs["optimizer pinned memory"] == {"requested": pin, "effective": pin}
    assert "Adam's moments never are" in done.log
    if stage == 3:
        assert knobs["parameter pinned memory"] == {"requested": pin, "effective": True}
        assert "DeepSpeed pins them in any case" in done.log


def test_a_buffer_that_is_not_pinned_although_it_should_be_ends_the_run(workplace):
    forgets = RECORDER + "CPU_Accelerator.is_pinned = lambda self, tensor: False\n"
    script, config = patched(workplace, "forgets", forgets), config_file(workplace, 2, True)
    done = run(workplace, "unpinned", "--deepspeed", config, script=script, code=3, **FEW)
    assert done.error_lines == [
        "error: knob audit: optimizer pinned memory: True was requested, False is what would run; "
        "correct the flag or the config"
    ]
