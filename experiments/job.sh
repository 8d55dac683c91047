#!/usr/bin/env bash
# What all experiments share. A .slurm file sources this and then uses the verbs
#   run_python FILE ARGS...     one process
#   run_torchrun FILE ARGS...   one process per GPU; torchrun starts them, once per node
#   run_srun FILE ARGS...       one process per GPU; srun starts them, no torchrun
#   check_bandwidth             all-reduce over the job's ranks first; too slow ends the job
# Before: site, folders, ranks, rendezvous (job_prepare). Beside: memory loggers on every node (job_on_node). After: the
# end of the run record, a summary, and the training's exit status as the job's (job_finish).
set -euo pipefail

# Closed ones: the next files to be opened would take their place
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null

EXPERIMENTS_FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh"

# 1. Before the training

job_directive() { # NAME: value behind "#SBATCH --NAME=" of the script that runs, 1 without one
  local line
  line=$(grep -m1 -E "^#SBATCH --$1=[^ ]" "$0" || echo "=1")
  [[ $line =~ =([^ ]+) ]]
  printf '%s' "${BASH_REMATCH[1]}"
}

job_python() { # MODULE ARGS...: one of scripts/job
  local -r module=job.$1
  shift
  # -P: not the experiment's folder first, where a file of a user may have one of the modules' names
  PYTHONPATH=$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH} python -P -m "$module" "$@"
}

job_prepare() {
  NODES=${SLURM_JOB_NUM_NODES:-$(job_directive nodes)}
  RANKS_PER_NODE=${SLURM_GPUS_PER_NODE:-$(job_directive gpus-per-node)}
  RANKS_PER_NODE=${RANKS_PER_NODE##*:} # a100:2 -> 2
  JOB_ID=${SLURM_JOB_ID:-${JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}}
  ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1))
  STARTED=$(date -u +%Y-%m-%dT%H:%M:%S+00:00) # as in the run record
  if [[ ! $JOB_ID =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$ ]]; then
    job_fail JOB_ID "'${JOB_ID:0:80}' cannot name files" "give up to 64 letters, digits, . _ or -"
  fi
  if [[ -z ${SLURM_JOB_ID:-} && $NODES -gt 1 ]]; then
    job_fail "$(basename "$0")" "it needs $NODES nodes, and there is no Slurm here" "submit it with sbatch" 3
  fi
  local number
  for number in MAX_RESTARTS LOG_LIMIT LOST_NODE_TIMEOUT; do
    if [[ ! ${!number} =~ ^[0-9]+$ ]]; then
      job_fail "$number" "'${!number}' is no number" "give a whole number, or unset it"
    fi
  done
  job_check_folder
  if ((ATTEMPT > MAX_RESTARTS + 1)); then
    job_fail MAX_RESTARTS "this job was started again $MAX_RESTARTS times" "look for the reason in its log, then submit it anew" 3
  fi
  RUN_DIR=$PWD/results/.$JOB_ID
  mkdir -p log gpu_memory cpu_memory "$RUN_DIR" ||
    job_fail "$PWD" "it cannot be written" "free disk space, or see its permissions" 3
  job_lock
  # of an attempt whose node failed
  rm -f "$RUN_DIR"/{exit_codes,gaps,warned,node_failed,bandwidth.json,compiled,joined_*,problem_*}
  rm -rf "$RUN_DIR"/.ranks_* # of ranks that were killed
  trap job_finish EXIT
  job_trap_signals
  job_keep_output
  if grep -qs '"status": "running"' results/*.json; then
    job_python finish --sweep || true
  fi
  job_set_threads
  job_set_rendezvous
  job_skip_steps
  JOB_OVERRIDES=$(job_overrides)
  JOB_GIT=$(job_python git_state) || JOB_GIT=
  BANDWIDTH_FILE=$RUN_DIR/bandwidth.json
  echo "job $JOB_ID of $EXPERIMENT: site $SITE, $NODES node(s) x $RANKS_PER_NODE rank(s), rendezvous $MASTER_ADDR:$MASTER_PORT"
  echo "nodes: ${ALL_NODES//$'\n'/ }"
}

job_check_folder() { # that the script is this folder's: results would bear the wrong experiment's name
  local script=$0
  if [[ -n ${SLURM_JOB_ID:-} ]]; then # which has copied it
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=//p') || true
  fi
  if [[ $script = *.slurm* && ! $(dirname "${script%.slurm*}") -ef $PWD ]]; then
    job_fail "$script" "it is not of this folder, $PWD" "submit it in its own folder"
  fi
}

# In a job that was started again: let its steps have numbers that no attempt before had. What Slurm could not tell a
# node that had failed, to end step 1 of this job, it tells the node once a minute, also when that is back and runs this
job_skip_steps() {
  if [[ $NODES -eq 1 || -z ${SLURM_JOB_ID:-} ]]; then
    return 0
  fi
  local step
  for ((step = 0; step < 2 * (ATTEMPT - 1); step++)); do # an attempt has two: bandwidth test and training
    srun --quiet --nodes=1 --ntasks=1 true || true
  done
}

job_overrides() { # what was submitted otherwise than the script says
  local name text=""
  for name in nodes gpus-per-node; do
    local planned actual=$NODES
    planned=$(job_directive "$name")
    if [[ $name = gpus-per-node ]]; then
      actual=$RANKS_PER_NODE
    fi
    if [[ ${planned##*:} != "$actual" ]]; then
      text+="${text:+;}$name: $actual instead of ${planned##*:}"
    fi
  done
  printf '%s' "$text"
}

job_lock() { # until this process and all its children have ended: two runs of one id would write the same files
  if ! { exec {JOB_LOCK}>"$RUN_DIR/job.lock"; } 2>/dev/null; then
    job_fail "$RUN_DIR" "it cannot be written" "free disk space, or see its permissions" 3
  fi
  local code=0 patience=0
  if ((ATTEMPT > 1)); then
    patience=120 # a file server may keep the lock of a node that has failed for so long
  fi
  flock --timeout "$patience" --conflict-exit-code 99 "$JOB_LOCK" 2>/dev/null || code=$?
  if [[ $code = 99 ]]; then
    job_fail JOB_ID "another run of $JOB_ID is writing its files" "give another one, or wait for its end"
  fi
}

# What is printed reaches the log to the end, even if the terminal is closed, or the reader of a pipe
job_keep_output() {
  if [[ -z ${SLURM_JOB_ID:-} ]]; then # Slurm writes the log itself
    JOB_LOG=log/$(job_directive job-name)_$JOB_ID.out
    exec > >(job_ignore_signals && exec tee -p -a "$JOB_LOG") 2> >(job_ignore_signals && exec tee -p -a "$JOB_LOG" >&2)
  fi
}

job_trap_signals() {
  local signal
  for signal in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # the signal's name is meant to be expanded now
    trap "job_stop $signal" "$signal"
  done
  trap '' PIPE # nobody reads what it prints: it goes on
}

job_ignore_signals() { # for what must live on to write the end
  trap '' TERM INT HUP USR1 USR2 PIPE
}

job_set_threads() {
  local -r installed=$(nproc)
  local cpus=${SLURM_CPUS_ON_NODE:-$installed}
  if ((cpus > installed)); then
    cpus=$installed
  fi
  cpus=$((cpus / RANKS_PER_NODE))
  if ((cpus < 1)); then
    cpus=1
  fi
  # torchrun would set 1, and DeepSpeed's CPU optimizer would crawl
  : "${OMP_NUM_THREADS:=$cpus}"
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    # since Slurm 22.05 srun no longer inherits --cpus-per-task
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  fi
}

job_set_rendezvous() {
  if [[ $NODES -eq 1 ]]; then
    ALL_NODES=$(hostname)
    MASTER_ADDR=127.0.0.1
  else
    ALL_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    if [[ -z ${MASTER_ADDR:-} ]]; then
      # a number: here, on the first node, its name may mean loopback
      local nodes
      mapfile -t nodes <<<"$ALL_NODES"
      MASTER_ADDR=$(job_python rendezvous address "${nodes[@]:1}") || exit
    fi
  fi
  MASTER_PORT=$(job_free_port) || exit 3
}

job_free_port() { # differs from job to job, skips one that is taken; Linux gives those from 32768 on to any connection
  python - "$JOB_ID" <<'PYTHON'
import contextlib, socket, sys, zlib
for offset in range(200):
    port = 20000 + (zlib.crc32(sys.argv[1].encode()) + offset) % 12000
    with contextlib.suppress(OSError), socket.socket() as listener:
        listener.bind(("", port))
        print(port)
        sys.exit()
sys.exit("error: MASTER_PORT: no free port among 200; end other programs on this node, or exclude it")
PYTHON
}

# 2. The verbs

run_python() {
  job_on_node python "$@"
}

run_torchrun() {
  # static: a c10d store unpickles what anybody sends it, and its ranks are given a name instead of MASTER_ADDR
  local -r launch=(python "$ROOT/scripts/launch.py" --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE"
    --rdzv-backend=static --rdzv-id="$JOB_ID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  rm -f "$RUN_DIR"/{joined,problem}_* # which launch.py left of the bandwidth test
  if [[ $NODES -gt 1 ]]; then
    job_srun --ntasks="$NODES" --ntasks-per-node=1 bash "$EXPERIMENTS_FOLDER/job.sh" on_node "${launch[@]}" "$@"
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
      bash "$EXPERIMENTS_FOLDER/job.sh" on_node python "$@"
  fi
}

check_bandwidth() { # without memory loggers: those files belong to the training
  LOGGERS=no run_torchrun "$ROOT/scripts/measure_bandwidth.py" --output "$BANDWIDTH_FILE"
}

job_srun() {
  # --kill-on-bad-exit: one failed rank must end the others, which would wait for it
  job_start srun --nodes="$NODES" --kill-on-bad-exit=1 --cpu-bind=none "$@"
  job_watch_srun "$CHILD" &
  local -r watcher=$!
  local code=0
  job_wait || code=$?
  kill "$watcher" 2>/dev/null || true
  if [[ $code = 0 ]]; then # so says srun, too, when it gives up on a cancelled step whose ranks are slow to save
    job_wait_for_orphans
    code=$(job_python finish "$JOB_ID" --own-exit-code --since "$STARTED") || code=0
  fi
  return "$code"
}

job_watch_srun() { # PID: a node that failed, and was back before Slurm noticed, knows nothing of its tasks; srun waits on
  trap - TERM
  local elapsed=0
  while kill -0 "$1" 2>/dev/null; do
    job_pause 1
    if [[ -s $RUN_DIR/exit_codes ]]; then
      elapsed=$((elapsed + 1))
    fi
    if ((elapsed > LOST_NODE_TIMEOUT)); then
      printf 'error: srun: it still waits %s s behind the end of a node; %s\n' "$LOST_NODE_TIMEOUT" \
        "another node has probably failed and come back: see scontrol show node" >&2
      : >"$RUN_DIR/node_failed" || true
      kill -KILL "$1" || true
      return 0
    fi
  done
}

# 3. On each node: the command, and the memory loggers beside it

job_on_node() { # COMMAND: its exit status
  local -r host=${SLURMD_NODENAME:-$(hostname)}
  local suffix=""
  if [[ $NODES -gt 1 ]]; then
    suffix=_$host
  fi
  if [[ " $* " = *" --deepspeed "* ]]; then # compile before the loggers start: g++ would be the peak of CPU memory
    job_start python "$ROOT/scripts/build_ops.py"
    job_wait || true
  fi
  job_start "$@"
  if [[ ${LOGGERS:-yes} = yes && ${SLURM_LOCALID:-0} = 0 ]]; then
    if job_wait_for_compiler "$@"; then
      job_cpu_logger "cpu_memory/cpu_memory_log_$JOB_ID$suffix.txt"
      job_gpu_logger "gpu_memory/gpu_memory_log_$JOB_ID$suffix.csv"
    fi
  fi
  local code=0
  job_wait || code=$?
  job_stop_loggers
  if [[ $code != 0 ]]; then
    # srun reports the highest code of all nodes, which is often that of a node it ended: note who was first, by the
    # nodes' clocks, which agree well enough, as srun takes a while to end the others
    echo "$(date +%s%N) $code $host" >>"$RUN_DIR/exit_codes" || true
  fi
  return "$code"
}

job_wait_for_compiler() { # COMMAND: g++ and Triton take GBs in the first steps. Fails if the training ends before
  if [[ ! ${TORCH_COMPILE:-} =~ ^([Tt]rue|TRUE|[Yy]es|YES|[TtYy1])$ && " $* " != *" --torch_compile "* ]]; then
    return 0
  fi
  while [[ ! -e $RUN_DIR/compiled ]] && kill -0 "$CHILD" 2>/dev/null; do
    job_pause 0.2
  done
  if [[ ! -e $RUN_DIR/compiled ]]; then
    job_gap "no memory logs on $host: they start after step 3, and the training ended before"
    return 1
  fi
  job_gap "memory logs on $host start after step 3: what torch.compile itself needs is left out"
}

job_gloo_interface() { # gloo would take the one that has this node's own name, which may be loopback
  if [[ $NODES -eq 1 || -n ${GLOO_SOCKET_IFNAME:-} ]]; then
    return 0
  fi
  local interface=""
  interface=$(job_python rendezvous interface "$MASTER_ADDR") || true
  if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface
  fi
}

job_gap() { # TEXT: what a log lacks; the summary shows it
  echo "$1" >>"$RUN_DIR/gaps" || true
}

job_logger() { # PROGRAM FILE ARGS...: start it in the background; training goes on without it
  local -r program=$1 file=$2 parent=$BASHPID
  shift 2
  if ! command -v "$program" >/dev/null; then
    job_gap "$program is not installed on $host: no $file"
    return 0
  fi
  (
    trap '' INT HUP USR1 USR2 # of a signal to all of a job's processes the training ends, and this behind it
    if [[ $program = psrecord ]]; then
      exec >/dev/null # not the log: that is --log
    else
      exec >&3
    fi
    exec python -P "$ROOT/scripts/job/with_parent.py" "$parent" "$program" "$@" 2>/dev/null
  ) 3> >(
    # appended, as psrecord would not: the job may have been started again; and never so much that it fills the disk
    job_ignore_signals
    ulimit -f $((LOG_LIMIT / 1024))
    exec cat >>"$file" 2>/dev/null
  ) &
  LOGGER_PIDS+=("$!:$program")
}

job_cpu_logger() { # FILE
  local watched=$CHILD
  if [[ ${SLURM_STEP_NUM_TASKS:-1} -gt $NODES ]]; then
    # several tasks of one srun step on this node: watch slurmstepd, the parent of them all
    watched=$PPID
  fi
  job_logger psrecord "$1" "$watched" --include-children --interval "$LOG_INTERVAL" --log /dev/fd/3
}

job_gpu_logger() { # FILE: of the job's own GPUs, since nvidia-smi shows those of its neighbours as well
  local gpus=""
  if command -v nvidia-smi >/dev/null; then
    if ! gpus=$(job_python gpus --ranks "$RANKS_PER_NODE" --gaps "$RUN_DIR/gaps"); then
      job_gap "scripts/job/gpus.py failed on $host: the GPU log holds all GPUs that nvidia-smi shows, other jobs' too"
    fi
  fi
  if [[ $gpus = none ]]; then
    return 0
  fi
  job_logger nvidia-smi "$1" ${gpus:+-i "$gpus"} \
    --query-gpu=timestamp,index,name,memory.used,memory.total --format=csv,nounits -l "$LOG_INTERVAL"
}

job_stop_loggers() {
  local logger pid program
  for logger in "${LOGGER_PIDS[@]}"; do
    pid=${logger%%:*}
    program=${logger#*:}
    if kill -TERM "$pid" 2>/dev/null; then
      job_end_logger "$pid" "$program"
    elif [[ $STOPPED = no ]]; then
      local code=0
      wait "$pid" || code=$?
      # psrecord ends by itself when the training does, with 0
      if [[ $program != psrecord || $code != 0 ]]; then
        job_gap "$program on $host ended before the training: its log is not complete"
      fi
    fi
  done
}

job_end_logger() { # PID PROGRAM: a TERM that comes before its exec runs this script's trap in it, and is lost: send more
  local attempt
  for ((attempt = 0; attempt < 100; attempt++)); do
    sleep 0.1
    kill -TERM "$1" 2>/dev/null || return 0
  done
  kill -KILL "$1" 2>/dev/null || true
  job_gap "$2 on $host did not end when it was told to, and was killed"
}

# 4. The child that this script waits for, and signals

job_start() { # COMMAND
  local -r parent=$BASHPID
  python -P "$ROOT/scripts/job/with_parent.py" "$parent" "$@" &
  CHILD=$!
  if [[ $STOPPED = yes ]]; then # the signal came before CHILD was known
    job_signal_child TERM
  fi
}

job_signal_child() { # SIGNAL
  # Until its exec the child is this script once more, in which the signal would run this script's trap, and be lost
  while cmp -s "/proc/$CHILD/cmdline" "/proc/$BASHPID/cmdline"; do
    sleep 0.01
  done
  kill -"$1" "$CHILD" 2>/dev/null || true
}

# For CHILD: its exit status. Not by wait alone: bash loses the status of a child that ends in the moment in which a
# trapped signal interrupts that builtin, as Ctrl-C does to both, and would then wait for ever
job_wait() {
  while kill -0 "$CHILD" 2>/dev/null; do
    job_pause 0.2
  done
  local code=0
  wait "$CHILD" || code=$?
  return "$code"
}

job_pause() { # SECONDS: a sleep that is no process, and so cannot be left behind
  read -rt "$1" -u "$PAUSE" || true
}

job_stop() { # SIGNAL: ask the training to save and stop
  STOPPED=yes
  if [[ $1 = USR1 ]]; then # the site's warning that time is running out; on a node the job's own script must hear of it
    : >"$RUN_DIR/warned" || true
  else
    CANCELLED=yes
  fi
  if [[ -n $CHILD ]]; then
    # what bash starts in the background is deaf to INT, and srun has ideas of its own about HUP
    local passed_on=TERM
    if [[ $1 = USR1 ]]; then
      passed_on=USR1
    fi
    job_signal_child "$passed_on"
  fi
  if [[ $ON_NODE = no && $BASHPID = "$$" ]]; then
    # at once: a training that does not react is killed, and this script with it
    job_python finish "$JOB_ID" --signal --exit-code 143 --since "$STARTED" || true
  fi
}

# 5. The end of a job

job_finish() { # on EXIT, also when the training failed: errexit ends the script behind a verb that returns its status
  local code=$?
  if [[ $BASHPID != "$$" ]]; then # a child that TERM met before its exec
    exit
  fi
  trap - EXIT
  job_ignore_signals # a second one must not interrupt this
  job_wait_for_orphans
  if [[ -s $RUN_DIR/exit_codes ]]; then
    code=$(sort -n "$RUN_DIR/exit_codes" | head -n 1 | cut -d' ' -f2)
  fi
  if [[ $code = 130 ]]; then # Ctrl-C reached the training first
    STOPPED=yes
    code=143
  fi
  local again=no
  if [[ -e $RUN_DIR/warned && $CANCELLED = no ]] && ((code == 75 || code > 128)); then
    STOPPED=yes
    again=yes
  elif [[ -e $RUN_DIR/node_failed && $STOPPED = no ]]; then
    again=yes
  fi
  job_record "$code"
  rm -f "$RUN_DIR"/{lock,job.lock,exit_codes,gaps,warned,node_failed,bandwidth.json,compiled,joined_*,problem_*}
  rm -rf "$RUN_DIR"/.ranks_* # of ranks that were killed
  rmdir "$RUN_DIR" || true
  job_upload
  if [[ $again = yes ]]; then
    job_requeue
  fi
  exit "$code"
}

job_wait_for_orphans() { # ranks whose launcher was killed: they save, and end with it, but not at once
  local code=0
  if [[ -e $RUN_DIR/lock ]]; then
    flock --timeout 300 --conflict-exit-code 99 "$RUN_DIR/lock" true 2>/dev/null || code=$?
  fi
  if [[ $code = 99 ]]; then
    job_gap "a rank still runs, five minutes after its launcher has ended"
  fi
}

job_requeue() { # Slurm starts the job again, under the same id: it goes on from its checkpoint
  if [[ ${REQUEUE:-0} != 1 || -z ${SLURM_JOB_ID:-} ]]; then
    return 0
  fi
  if ((ATTEMPT > MAX_RESTARTS)); then
    echo "not requeued: this job was started again $MAX_RESTARTS times (MAX_RESTARTS)"
  elif ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "not requeued: Slurm refused it; where the site's default is not to, submit with SBATCH_REQUEUE=1 set"
  fi
}

job_record() { # EXIT_CODE: finish the run record and print the summary
  local status=()
  if [[ $STOPPED = yes ]] && (($1 == 75 || $1 > 128)); then
    status=(--status stopped)
    if [[ $(timeout 5 scontrol show job "${SLURM_JOB_ID:-0}" 2>&1) = *Reason=TimeLimit* ]]; then
      status=(--status timeout)
    fi
  fi
  job_python finish "$JOB_ID" --exit-code "$1" "${status[@]}" --since "$STARTED" --gaps "$RUN_DIR/gaps" || true
}

job_upload() { # the job's offline runs to Weights & Biases, where the site says that nodes have network
  if [[ ${WANDB_ONLINE:-0} != 1 || ! -d wandb/$JOB_ID ]]; then
    return 0 # in a trap, return alone would give the status from before it
  fi
  # a job that was stopped has no time for it; and a signal may end it
  if [[ $STOPPED = yes ]] || ! (trap - TERM INT HUP && exec python "$ROOT/scripts/tracking.py" "$JOB_ID"); then
    printf 'not uploaded to Weights & Biases; later, in this folder: python %q %q\n' "$ROOT/scripts/tracking.py" "$JOB_ID"
  fi
}

# 6. What runs when this file is sourced, or started on a node

CHILD=""
STOPPED=no   # a signal came
CANCELLED=no # one other than USR1
ON_NODE=no
exec {PAUSE}<> <(:) # a pipe into which nobody writes
LOGGER_PIDS=()

if [[ ${1:-} = on_node && ${BASH_SOURCE[0]} = "$0" ]]; then # the part of a job that srun starts on each node
  shift
  ON_NODE=yes
  job_trap_signals
  export PET_NODE_RANK=${SLURM_NODEID:-0} # torchrun's --node-rank
  job_gloo_interface
  job_on_node "$@"
  exit
fi

# Where the experiment stands, the first time; then, with a snapshot, all of this once more from its frozen copy
if [[ $EXPERIMENTS_FOLDER != "${SNAPSHOT:-none}/experiments" ]]; then
  export EXPERIMENT=experiments/${PWD#"$EXPERIMENTS_FOLDER"/}
  if [[ -n ${SNAPSHOT:-} ]]; then
    source "$SNAPSHOT/experiments/job.sh" # frozen by submit.sh --snapshot; results land here all the same
    return
  fi
fi
set -a # knobs of site and experiment reach the training, and RUN_DIR, JOB_ID, NODES and others this file on each node
job_find_site
job_load_site
: "${LOG_INTERVAL:=5}"
: "${REQUIRE_GPU:=1}"
: "${JOIN_TIMEOUT:=300}"
: "${MAX_RESTARTS:=10}"
: "${LOST_NODE_TIMEOUT:=360}"        # more than SlurmdTimeout, after which Slurm itself notices: 300 by default
: "${LOG_LIMIT:=200000000}"          # bytes of one memory log
: "${CUDA_DEVICE_ORDER:=PCI_BUS_ID}" # CUDA would count from the fastest GPU, nvidia-smi and Slurm count along the bus
: "${TORCH_CPP_LOG_LEVEL:=ERROR}"    # WARNING tells of each socket that is closed
job_prepare
