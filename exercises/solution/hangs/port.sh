#!/usr/bin/env bash
# Repaired job 2: two users start the same job on one node, and the launcher of each job finds a free port.
#     bash exercises/solution/hangs/port.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

start_job() { # starts two ranks of the job NAME
  # --standalone: torchrun itself listens on a free port. A port that is only looked up may be taken before its use
  OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 ../../hangs/hello.py "$1" &
}

start_job ada
start_job bob
wait
