"""What the audit reads from a model that FSDP1 has wrapped, as far as that goes without a GPU."""

import itertools
import json
import shutil
from pathlib import Path

from helpers import run


def test_units_and_share_of_fsdp1(workplace):
    shutil.copy(Path(__file__).with_name("fsdp1_wrap.py"), workplace)
    done = run(workplace, "fsdp1", script="fsdp1_wrap.py", processes=2)
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


def test_a_step_that_overflows_in_fp16_is_skipped_on_all_ranks(workplace):
    """With the fused optimizer, which is left to skip steps by itself unless WorkshopTrainer says otherwise."""
    shutil.copy(Path(__file__).with_name("fsdp_loss_scale.py"), workplace)
    done = run(workplace, "fsdp_loss_scale", script="fsdp_loss_scale.py", processes=2)
    steps = [tuple(map(float, line.split()[1:])) for line in done.log.splitlines() if line.startswith("step ")]
    assert len(steps) == 25
    scales, losses = zip(*steps, strict=True)
    assert scales[0] == 2.0**29, "the first step overflows, and halves the scale"
    skipped = sum(later < earlier for earlier, later in itertools.pairwise((2.0**30, *scales)))
    assert len(set(losses[: skipped + 1])) == 1, "the weights stay as they are until the scale fits"
    assert losses[-1] < losses[0]
