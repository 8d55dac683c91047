"""Started by test_sharding.py on two ranks: wrap with FSDP1 (its forward pass needs a GPU) and print what is seen."""

import functools
import json
import sys

sys.path.insert(0, "scripts")

import sharding
import torch
import torch.distributed as dist
from custom_model import CustomGPTBlock, CustomGPTConfig, CustomGPTForCausalLM
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

dist.init_process_group("gloo")
sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "ff_dim": 32, "seq_length": 16}
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={CustomGPTBlock})
model = FullyShardedDataParallel(
    CustomGPTForCausalLM(CustomGPTConfig(**sizes)),
    auto_wrap_policy=policy,
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
names = ["CustomGPTBlock"]
if dist.get_rank() == 0:
    seen = {
        "blocks": len(sharding.blocks(model, names)),
        "sharded": len(sharding.sharded_blocks(model, names)),
        "others": sharding.other_units(model, names),
        "share": round(sharding.local_share(model), 3),
        "name": sharding.live_name(model, names),
        "mesh": sharding.mesh_shape(model),
        "offloaded": sharding.offloaded(model),
    }
    print("seen", json.dumps(seen), flush=True)
dist.barrier()
dist.destroy_process_group()
