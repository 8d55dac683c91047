#!/usr/bin/env bash
# What all experiments share. A .slurm file sources this and then uses the verbs
#   run_python FILE ARGS...     one process
#   run_torchrun FILE ARGS...   one process per GPU; torchrun starts them, once per node
#   run_srun FILE ARGS...       one process per GPU; srun starts them, no torchrun
#   check_bandwidth             all-reduce over the job's ranks first; too slow ends the job
# Before: site, folders, ranks, rendezvous. Beside: memory loggers on every node. After: the end of the run
# record, a summary, and the training's exit status as the job's.
set -euo pipefail

job_fail() { # WHAT PROBLEM WAY_OUT [EXIT_CODE]
  printf 'error: %s: %s; %s\n' "$1" "$2" "$3" >&2
  exit "${4:-2}"
}

job_directive() { # NAME: value behind "#SBATCH --NAME=" of the script that runs, 1 without one
  local line
  line=$(grep -m1 -E "^#SBATCH --$1=[^ ]" "$0" || echo "=1")
  [[ $line =~ =([^ ]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
}

job_load_site() {
  local name=${SITE:-}
  [[ -n $name || ! -f $EXPERIMENTS/site ]] || name=$(<"$EXPERIMENTS/site")
  local -r way_out="choose one of experiments/sites (laptop needs no GPU), with SITE=name or as the content of experiments/site"
  [[ -n $name ]] || job_fail SITE "no site is chosen" "$way_out"
  [[ $name != */* && -f $EXPERIMENTS/sites/$name.sh ]] || job_fail SITE "there is no experiments/sites/$name.sh" "$way_out"
  SITE=$name
  # shellcheck source=experiments/sites/laptop.sh
  source "$EXPERIMENTS/sites/$SITE.sh"
  set +au # not the functions that module and conda bring along; their scripts use unset variables
  site_setup
  set -au
  command -v python >/dev/null || job_fail "experiments/sites/$SITE.sh" "there is no python after site_setup" "activate the environment there" 3
}

job_prepare() {
  NODES=${SLURM_JOB_NUM_NODES:-$(job_directive nodes)}
  RANKS_PER_NODE=${SLURM_GPUS_PER_NODE:-$(job_directive gpus-per-node)}
  RANKS_PER_NODE=${RANKS_PER_NODE##*:} # a100:2 -> 2
  JOB_ID=${SLURM_JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}
  [[ -n ${SLURM_JOB_ID:-} || $NODES -eq 1 ]] ||
    job_fail "$(basename "$0")" "it needs $NODES nodes, and there is no Slurm here" "submit it with sbatch" 3
  RUN_DIR=$PWD/results/.$JOB_ID
  mkdir -p log gpu_memory cpu_memory "$RUN_DIR"
  if [[ -z ${SLURM_JOB_ID:-} ]]; then # Slurm writes the log itself
    JOB_LOG=log/$(job_directive job-name)_$JOB_ID.out
    exec > >(trap '' TERM INT HUP && exec tee -a "$JOB_LOG") 2> >(trap '' TERM INT HUP && exec tee -a "$JOB_LOG" >&2)
  fi
  local cpus=${SLURM_CPUS_ON_NODE:-$(nproc)}
  cpus=$(((cpus < $(nproc) ? cpus : $(nproc)) / RANKS_PER_NODE))
  # torchrun would set 1, and DeepSpeed's CPU optimizer would crawl
  : "${OMP_NUM_THREADS:=$((cpus > 1 ? cpus : 1))}"
  # since Slurm 22.05 srun no longer inherits --cpus-per-task
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  ALL_NODES=$(if [[ $NODES -gt 1 ]]; then scontrol show hostnames "$SLURM_JOB_NODELIST"; else hostname; fi)
  if [[ $NODES -eq 1 ]]; then
    MASTER_ADDR=127.0.0.1
  elif [[ -z ${MASTER_ADDR:-} ]]; then
    # a number: here, on the first node, its name may mean loopback
    local nodes
    mapfile -t nodes <<<"$ALL_NODES"
    MASTER_ADDR=$(python "$ROOT/scripts/rendezvous.py" address "${nodes[@]:1}") || exit
  fi
  MASTER_PORT=$(job_free_port)
  BANDWIDTH_FILE=$RUN_DIR/bandwidth.json
  echo "job $JOB_ID of $EXPERIMENT: site $SITE, $NODES node(s) x $RANKS_PER_NODE rank(s), rendezvous $MASTER_ADDR:$MASTER_PORT"
  echo "nodes: ${ALL_NODES//$'\n'/ }"
}

job_free_port() { # differs from job to job, skips one that is taken; Linux gives those from 32768 on to any connection
  python - "$JOB_ID" <<'EOF'
import contextlib, socket, sys, zlib
for offset in range(200):
    port = 20000 + (zlib.crc32(sys.argv[1].encode()) + offset) % 12000
    with contextlib.suppress(OSError), socket.socket() as listener:
        listener.bind(("", port))
        sys.exit(print(port))
EOF
}

run_python() { job_on_node python "$@"; }

run_torchrun() {
  # static: a c10d store unpickles what anybody sends it, and its ranks are given a name instead of MASTER_ADDR
  local -r launch=(python "$ROOT/scripts/launch.py" --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE"
    --rdzv-backend=static --rdzv-id="$JOB_ID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  rm -f "$RUN_DIR"/{joined,problem}_* # of the bandwidth test
  if [[ $NODES -gt 1 ]]; then
    job_srun --ntasks="$NODES" --ntasks-per-node=1 bash "$EXPERIMENTS/job.sh" on_node "${launch[@]}" "$@"
  else
    job_on_node "${launch[@]}" "$@"
  fi
}

run_srun() {
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "no Slurm here: torchrun starts the $RANKS_PER_NODE ranks instead of srun"
    run_torchrun "$@"
  else
    job_srun --ntasks=$((NODES * RANKS_PER_NODE)) --ntasks-per-node="$RANKS_PER_NODE" \
      bash "$EXPERIMENTS/job.sh" on_node python "$@"
  fi
}

check_bandwidth() { LOGGERS=no run_torchrun "$ROOT/scripts/bandwidth_test.py" --output "$BANDWIDTH_FILE"; }

# --kill-on-bad-exit: one failed rank must end the others, which would wait for it
job_srun() { job_start srun --nodes="$NODES" --kill-on-bad-exit=1 --cpu-bind=none "$@" && job_wait; }

job_gloo_interface() { # gloo would take the one that has this node's own name, which may be loopback
  local interface=""
  if [[ $NODES -gt 1 && -z ${GLOO_SOCKET_IFNAME:-} ]]; then
    interface=$(python "$(dirname "${BASH_SOURCE[0]}")/../scripts/rendezvous.py" interface "$MASTER_ADDR") || true
    [[ -z $interface ]] || export GLOO_SOCKET_IFNAME=$interface
  fi
}

job_on_node() { # COMMAND: run it on this node, loggers beside it
  local code=0 suffix="" host=${SLURMD_NODENAME:-$(hostname)}
  [[ $NODES -eq 1 ]] || suffix=_$host
  if [[ " $* " = *" --deepspeed "* ]]; then # compile before the loggers start: g++ would be the peak of CPU memory
    job_start python "$(dirname "${BASH_SOURCE[0]}")/../scripts/build_ops.py"
    job_wait || true
  fi
  job_start "$@"
  if [[ ${LOGGERS:-yes} = yes && ${SLURM_LOCALID:-0} = 0 ]]; then
    # several tasks of one srun step on this node: watch slurmstepd, the parent of them all
    local watched=$CHILD
    [[ ${SLURM_STEP_NUM_TASKS:-1} -le $NODES ]] || watched=$PPID
    job_logger psrecord "cpu_memory/cpu_memory_log_$JOB_ID$suffix.txt" \
      "$watched" --include-children --interval "$LOG_INTERVAL" --log "cpu_memory/cpu_memory_log_$JOB_ID$suffix.txt"
    job_gpu_logger "gpu_memory/gpu_memory_log_$JOB_ID$suffix.csv"
  fi
  job_wait || code=$?
  job_stop_loggers
  # srun reports the highest code of all nodes, which is often that of a node it ended: note who was first
  [[ $code = 0 ]] || echo "$(date +%s%N) $code $host" >>"$RUN_DIR/exit_codes"
  return "$code"
}

job_logger() { # PROGRAM FILE ARGS...: start it in the background; training goes on without it
  local -r program=$1 file=$2 && shift 2
  command -v "$program" >/dev/null || { echo "$program is not installed on $host: no $file" >>"$RUN_DIR/gaps" && return; }
  if [[ $program = psrecord ]]; then "$program" "$@" >/dev/null 2>&1 & else "$program" "$@" >"$file" 2>/dev/null & fi
  LOGGER_PIDS+=("$!:$program")
}

job_gpu_logger() { # FILE: of the job's own GPUs, since nvidia-smi shows those of its neighbours as well
  local gpus="" scripts
  scripts=$(dirname "${BASH_SOURCE[0]}")/../scripts
  if command -v nvidia-smi >/dev/null &&
    ! gpus=$(python "$scripts/job_gpus.py" --ranks "$RANKS_PER_NODE" --gaps "$RUN_DIR/gaps"); then
    echo "job_gpus.py failed on $host: the GPU log holds all GPUs that nvidia-smi shows, other jobs' too" >>"$RUN_DIR/gaps"
  fi
  [[ $gpus = none ]] || job_logger nvidia-smi "$1" ${gpus:+-i "$gpus"} \
    --query-gpu=timestamp,index,name,memory.used,memory.total --format=csv,nounits -l "$LOG_INTERVAL"
}

job_stop_loggers() {
  local logger pid
  for logger in "${LOGGER_PIDS[@]}"; do
    pid=${logger%%:*}
    if kill -TERM "$pid" 2>/dev/null; then
      job_end_logger "$pid"
    # psrecord ends by itself when the training does, with 0
    elif [[ $STOPPED = no ]] && ! { wait "$pid" && [[ $logger = *:psrecord ]]; }; then
      echo "${logger#*:} on $host ended before the training: its log is not complete" >>"$RUN_DIR/gaps"
    fi
  done
}

job_end_logger() { # PID: a TERM that comes before its exec runs this script's trap in it, and is lost: send more
  local attempt
  for ((attempt = 0; attempt < 100; attempt++)); do
    sleep 0.1
    kill -TERM "$1" 2>/dev/null || return 0
  done
  kill -KILL "$1" 2>/dev/null || true
}

job_start() { # COMMAND
  "$@" &
  CHILD=$!
  [[ $STOPPED = no ]] || job_stop # before CHILD was known
}

job_wait() { # for CHILD: its exit status, also when a signal interrupts the waiting
  local code=0
  WOKEN=no
  wait "$CHILD" || code=$?
  if [[ $WOKEN = yes ]]; then job_wait; else return "$code"; fi
}

job_stop() { # on TERM and INT
  STOPPED=yes WOKEN=yes
  [[ -z $CHILD ]] || kill -TERM "$CHILD" 2>/dev/null || true
}

job_record() { # EXIT_CODE: finish the run record and print the summary
  local status=""
  [[ $STOPPED = no ]] || status=stopped
  [[ -z $status || $(timeout 5 scontrol show job "${SLURM_JOB_ID:-0}" 2>&1) != *Reason=TimeLimit* ]] || status=timeout
  python "$ROOT/scripts/finish.py" "$JOB_ID" --exit-code "$1" ${status:+--status "$status"} --gaps "$RUN_DIR/gaps" || true
}

job_finish() {
  local code=$?
  [[ $BASHPID = "$$" ]] || exit # a child that TERM met before its exec
  trap - EXIT
  trap '' TERM INT # a second signal must not interrupt this
  if [[ -s $RUN_DIR/exit_codes ]]; then code=$(sort -n "$RUN_DIR/exit_codes" | head -n 1 | cut -d' ' -f2); fi
  if [[ $STOPPED$code = yes0 || $code = 130 ]]; then STOPPED=yes code=143; fi # 130: Ctrl-C reached the training first
  job_record "$code"
  rm -rf "$RUN_DIR"
  exit "$code"
}

CHILD="" STOPPED=no WOKEN=no LOGGER_PIDS=()
if [[ ${1:-} = on_node && ${BASH_SOURCE[0]} = "$0" ]]; then # the part of a job that srun starts on each node
  shift
  trap job_stop TERM INT
  export PET_NODE_RANK=${SLURM_NODEID:-0} # torchrun's --node-rank
  job_gloo_interface
  job_on_node "$@"
  exit
fi

EXPERIMENTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $EXPERIMENTS != "${SNAPSHOT:-none}/experiments" ]]; then export EXPERIMENT=experiments/${PWD#"$EXPERIMENTS"/}; fi
if [[ -n ${SNAPSHOT:-} && $EXPERIMENTS != "$SNAPSHOT/experiments" ]]; then
  source "$SNAPSHOT/experiments/job.sh" # frozen by submit.sh --snapshot; results land here all the same
  return
fi
ROOT=$(dirname "$EXPERIMENTS")
set -a # site and experiment set knobs that the training reads
job_load_site
: "${LOG_INTERVAL:=5}" "${REQUIRE_GPU:=1}" "${JOIN_TIMEOUT:=300}"
# CUDA would count from the fastest GPU, nvidia-smi and Slurm count along the bus
: "${CUDA_DEVICE_ORDER:=PCI_BUS_ID}"
: "${TORCH_CPP_LOG_LEVEL:=ERROR}" # WARNING tells of each socket that is closed
job_prepare
trap job_finish EXIT
# The record says so at once: a training that does not react is killed, and this script with it
trap 'job_stop; job_record 143 >/dev/null' TERM INT
