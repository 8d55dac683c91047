"""What the audit reads from a model that FSDP1 has wrapped, as far as that goes without a GPU."""

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
