"""Broken job 4: the log says that a data file does not exist, but `ls` shows the file.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/hangs/missing_file.py

Here each rank represents a node with its own local disk, which is a folder in /tmp.
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

DATA = Path(__file__).resolve().parents[2] / "data" / "squad_sample.json"

dist.init_process_group("gloo")
rank = dist.get_rank()
with tempfile.TemporaryDirectory(prefix=f"disk_of_node{rank}_") as disk:
    copy = Path(disk) / DATA.name
    if rank == 0:
        shutil.copy(DATA, copy)
    dist.barrier()
    size = torch.tensor(float(len(copy.read_bytes())))
    dist.all_reduce(size)
    print(f"rank {rank}: done, {size.item() / dist.get_world_size():.0f} bytes on each node", flush=True)
dist.destroy_process_group()
