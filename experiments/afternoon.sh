#!/usr/bin/env bash
# The afternoon on a laptop: what each section runs, in the order of the agenda, with the laptop profile.
#     experiments/afternoon.sh
#     DRY_RUN=1 experiments/afternoon.sh    # show the jobs instead of running them
# `make pages` writes the lines below the marker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -f .venv/installed ]]; then PATH=$PWD/.venv/bin:$PATH; fi # the environment of make demo

exec 2>&1 # keep the printed lines and the output of the jobs in order, also in a pipe
echo "The times are those of a class, which also reads and discusses."
if [[ ${DRY_RUN:-0} != 0 ]]; then
  echo "This is a dry run: it shows what each job would run, and how much memory. Nothing is trained."
  torchrun() { :; } # the only command that is not a job
fi

# [[[cog import generated; generated.afternoon_script() ]]]

set -v # print each line below before it runs

# === 0:00  What this workshop is about (5 minutes, docs/introduction.md)

# === 0:05  2 Baseline: the Trainer alone (25 minutes, docs/baseline.md)
(cd experiments/baseline && SITE=laptop bash baseline.slurm)

# === 0:30  4 Collectives: how ranks exchange data (25 minutes, docs/collectives.md)
OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/collectives.py # one CPU thread per rank

# === 0:55  6 DDP: more GPUs, the same training (35 minutes, docs/ddp.md)
(cd experiments/ddp/1_gpus && SITE=laptop bash ddp.slurm)
(cd experiments/ddp/2_gpus && SITE=laptop bash ddp.slurm)

# === 1:30  Break

# === 1:50  9 ZeRO stages (35 minutes, docs/zero.md)
# choose 2: zero_0, zero_1, zero_2, zero_3
(cd experiments/deepspeed-single-gpu/zero_2 && SITE=laptop bash deepspeed_zero2.slurm)
(cd experiments/deepspeed-single-gpu/zero_3 && SITE=laptop bash deepspeed_zero3.slurm)

# === 2:25  11 Several GPUs of one node (40 minutes, docs/multi-gpu.md)
(cd experiments/deepspeed-multi-gpu/2_gpus && SITE=laptop bash deepspeed_2_gpus.slurm)
# choose 2: cpu_offloading/zero_1, cpu_offloading/zero_2, cpu_offloading/zero_3, zero_1, zero_2, zero_3
(cd experiments/deepspeed-multi-gpu/2_gpus_stages_comparison/zero_2 && SITE=laptop bash deepspeed_2_gpus_zero2.slurm)
(cd experiments/deepspeed-multi-gpu/2_gpus_stages_comparison/cpu_offloading/zero_2 && SITE=laptop bash deepspeed_2_gpus_zero2_offload.slurm)

# === 3:05  19 Choosing a method (25 minutes, docs/comparison.md)
(cd experiments/methods-comparison/ddp && SITE=laptop bash comparison.slurm)
(cd experiments/methods-comparison/fsdp2 && SITE=laptop bash comparison.slurm)
(cd experiments/methods-comparison/zero3 && SITE=laptop bash comparison.slurm)
(cd experiments/methods-comparison/zero3_offload && SITE=laptop bash comparison.slurm)

exit # 3:30  End

# [[[end]]]
