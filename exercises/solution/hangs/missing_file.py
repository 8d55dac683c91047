"""Repaired job 4. In the broken job, the log says that a data file does not exist, but `ls` shows the file.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/solution/hangs/missing_file.py

Here each rank represents a node with its own local disk, which is a folder in /tmp.
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

DATA = Path(__file__).resolve().parents[3] / "data" / "squad_sample.json"

dist.init_process_group("gloo")
rank = dist.get_rank()
with tempfile.TemporaryDirectory(prefix=f"disk_of_node{rank}_") as disk:
    copy = Path(disk) / DATA.name
    shutil.copy(DATA, copy)  # each node copies to its own disk
    size = torch.tensor(float(len(copy.read_bytes())))
    dist.all_reduce(size)
    print(f"rank {rank}: done, {size.item() / dist.get_world_size():.0f} bytes on each node", flush=True)
dist.destroy_process_group()
