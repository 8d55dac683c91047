"""Started by test_sharding.py on two ranks: fp16 with FSDP1's loss scaler, from a scale that overflows.

FSDP1 itself needs a GPU, so these are its scaler and optimizer in a loop by hand. Prints scale and loss of each step.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import BloomConfig, BloomForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, use_cache=False))
policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
for block in model.transformer.h:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
optimizer._step_supports_amp_scaling = False  # as WorkshopTrainer does; without it the first step fails
scaler = ShardedGradScaler(device="cpu", init_scale=2.0**30)
tokens = torch.randint(5, 60, (2, 16))
for _ in range(25):
    with torch.autocast("cpu", torch.float16):
        loss = model(input_ids=tokens, labels=tokens).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("step", scaler.get_scale(), loss.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
