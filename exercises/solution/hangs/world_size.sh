#!/usr/bin/env bash
# Repaired job 3. In the broken job, nothing happens for 20 seconds, then each rank fails with an error.
#     bash exercises/solution/hangs/world_size.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

GPUS_PER_NODE=2
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000))
export WORLD_SIZE=$GPUS_PER_NODE # the number is set in one place only

for ((rank = 0; rank < GPUS_PER_NODE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank python ../../hangs/hello.py job &
done
wait
