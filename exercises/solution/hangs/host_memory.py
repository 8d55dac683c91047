"""Repaired job 6: the GPU is nearly empty, and the job is killed all the same, by signal 9.

    torchrun --nproc_per_node=2 exercises/solution/hangs/host_memory.py

The job has 1.5 GB of memory beside PyTorch itself, for all its processes together. On a cluster Slurm enforces `--mem`.
Here a thread of each rank does it in Slurm's place: it kills the rank once the ranks hold more.
"""

import os
import signal
import threading
import time

import psutil
import torch
import torch.distributed as dist

LIMIT = 1.5e9  # bytes
QUESTIONS = 250_000


def enforce_limit(limit: float) -> None:
    times_above = 0  # a process that starts another one has its memory counted twice for a moment
    while times_above < 5:
        ranks = psutil.Process(os.getppid()).children(recursive=True)
        above = sum(process.memory_info().rss for process in ranks) > limit
        times_above = times_above + 1 if above else 0
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pytorch = psutil.Process().memory_info().rss
threading.Thread(target=enforce_limit, args=[LIMIT + world * pytorch], daemon=True).start()
# a rank loads its own questions, and no others; 512 tokens of 8 bytes each
mine = torch.zeros(len(range(rank, QUESTIONS, world)), 512, dtype=torch.int64)
mine += rank  # memory counts once it is written to
dist.barrier()  # the training begins when all ranks are there
time.sleep(1)
print(f"rank {rank}: done, trains on {len(mine)} questions", flush=True)
dist.destroy_process_group()
