"""Broken job 6: the GPU is nearly empty, but signal 9 kills the job.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/hangs/host_memory.py

All processes of the job together may use 1.5 GB of memory, in addition to PyTorch itself. On a cluster, Slurm enforces
such a limit (`--mem`). In this exercise, a thread of each rank enforces it: it kills the rank when all ranks together
use more.
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
    # Five samples must exceed the limit, because memory is counted twice while a process starts another one.
    times_above = 0
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
# Each question is padded to 512 tokens of 8 bytes.
questions = torch.zeros(QUESTIONS, 512, dtype=torch.int64)
questions += rank  # memory is counted only after the program has written to it
mine = questions[rank::world]
dist.barrier()  # the training begins when all ranks are ready
time.sleep(1)
print(f"rank {rank}: done, trains on {len(mine)} questions", flush=True)
dist.destroy_process_group()
