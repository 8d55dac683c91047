#!/usr/bin/env bash
# Repaired job 2: two users start the same job on one node. Without the repair, one of the jobs fails.
#     bash exercises/solution/hangs/port.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2

free_port() { # asks the system for a port that is not in use
  python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

start_job() { # starts two ranks of the job NAME
  export MASTER_PORT
  MASTER_PORT=$(free_port)
  RANK=0 LOCAL_RANK=0 python ../../hangs/hello.py "$1" &
  RANK=1 LOCAL_RANK=1 python ../../hangs/hello.py "$1" &
}

start_job ada
start_job bob
wait
