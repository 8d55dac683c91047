"""The training of broken jobs 2 and 3: the ranks greet each other, and count how many they are."""

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
time.sleep(10)  # so that both jobs of port.sh are there at the same time
dist.destroy_process_group()
