"""The program of broken jobs 2 and 3. Each rank adds 1 in an all-reduce, so the sum is the number of ranks."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

name = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
count = torch.ones(1)
dist.all_reduce(count)
print(f"{name}: rank {dist.get_rank()} counts {count.item():.0f} ranks", flush=True)
time.sleep(10)  # keeps the first job of port.sh running while the second one starts
dist.destroy_process_group()
