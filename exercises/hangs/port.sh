#!/usr/bin/env bash
# Broken job 2: two users start the same job on one node. One of the jobs fails.
#     bash exercises/hangs/port.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2
export MASTER_PORT=$((20000 + UID % 10000)) # differs from other users' ports on this node

start_job() { # starts two ranks of the job NAME
  RANK=0 LOCAL_RANK=0 python hello.py "$1" &
  RANK=1 LOCAL_RANK=1 python hello.py "$1" &
}

start_job ada
start_job bob
wait
