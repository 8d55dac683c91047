"""Wrap a model with FSDP1 on two ranks and print its inspection, for test_audit_of_runs.py.

A training run with FSDP1 needs a GPU, but this does not.
"""

import functools
import json
import sys
from types import SimpleNamespace

sys.path.insert(0, "scripts")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from distributed import inspect_fsdp
from guard.audit import AuditCallback
from measure.exact_match import root_gathered
from models.custom_model import CustomGPTBlock, CustomGPTConfig, CustomGPTForCausalLM

dist.init_process_group("gloo")
sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "ff_dim": 32, "seq_length": 16}
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={CustomGPTBlock})
torch.manual_seed(0)
whole = CustomGPTForCausalLM(CustomGPTConfig(**sizes))
question = torch.tensor([[5, 6, 7]])
generate = {"inputs": question, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 3}
unwrapped = whole.generate(**generate).tolist()
parameters = AuditCallback(SimpleNamespace(model=whole), None, None).parameters
model = FullyShardedDataParallel(
    whole,
    auto_wrap_policy=policy,
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
names = ["CustomGPTBlock"]
model(input_ids=question)  # FSDP1 sets up its state in the first forward pass
with root_gathered(model), torch.no_grad():
    wrapped = model.generate(**generate, synced_gpus=True).tolist()
if dist.get_rank() == 0:
    seen = {
        "blocks": len(inspect_fsdp.modules_by_class(model, names)),
        "sharded": len(inspect_fsdp.sharded_blocks(model, names)),
        "others": inspect_fsdp.other_units(model, names),
        "share": round(inspect_fsdp.local_fraction(model), 3),
        "name": inspect_fsdp.live_strategy(model, names).name,
        "mesh": inspect_fsdp.mesh_shape(model),
        "offloaded": inspect_fsdp.shard_is_on_cpu(model),
        "parameters": parameters,
        "generates": wrapped == unwrapped,
    }
    print("seen", json.dumps(seen), flush=True)
dist.barrier()
dist.destroy_process_group()
