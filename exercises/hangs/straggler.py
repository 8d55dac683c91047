"""Broken job 5: it runs, but a step takes ten times as long as it should. Which rank is slow?

OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 exercises/hangs/straggler.py
"""

import platform
import time
import zlib

import torch
import torch.distributed as dist

STEPS = 10

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
# One node has a slow disk. The name of your machine decides which one, so that this file does not tell you.
slow_disk = zlib.crc32(platform.node().encode()) % world
gradient = torch.ones(1000)
started = time.perf_counter()
for _ in range(STEPS):
    time.sleep(0.02)  # the forward and backward pass
    if rank == slow_disk:
        time.sleep(0.2)
    dist.all_reduce(gradient)
seconds = time.perf_counter() - started
print(f"rank {rank}: {seconds / STEPS:.2f} s per step", flush=True)
dist.destroy_process_group()
