#!/usr/bin/env bash
# The common part of all experiments, which each .slurm file sources. Section 7 below loads the site, exports all
# variables that are set from there on (knobs reach Python as variables), and calls job_prepare. After that, the .slurm
# file calls one of the run_ functions. Some files call check_bandwidth before it.
#   run_python FILE ARGS...     one process
#   run_torchrun FILE ARGS...   one process per GPU, started by one torchrun per node (in scripts/launch.py)
#   run_srun FILE ARGS...       one process per GPU, started by srun without torchrun
#   check_bandwidth             an all-reduce over the job's ranks; a slow network ends the job
#   DRY_RUN=1 bash X.slurm      shows the site, the knobs and the commands, checks them, and writes nothing
# The parts of a job:
#   the .slurm file on the first node    job_prepare, then the functions above; job_finish always runs at the end
#     run_torchrun, for example          starts "job.sh on_node", by srun if there are several nodes
#       on each node (section 3)         the command and two memory loggers
# The job ends with the exit code of the rank that failed first. If no rank failed, the code is in the run record.
set -euo pipefail +o posix # sh can be bash in POSIX mode, which has no <(...) before bash 5.1

EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd) # -P: a link may lead to the experiment's folder
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh" # this file also defines job_fail

CHILD=""              # id of the process that receives this script's signals
STOPPED=no            # yes after any signal
WARNED=no             # yes after USR1: Slurm sends it before the time limit, if the site asks for it
CANCELLED=no          # yes after TERM, INT, HUP or USR2: somebody ended the job
SAVED=75              # exit code of a training that was stopped and has saved a checkpoint
declare -A SEEN=()    # values of the variables at the last call of job_note_origin
declare -A ORIGINS=() # source of each variable: submission, site or experiment

# 1. Before the training

job_prepare() {
  NODES=${SLURM_JOB_NUM_NODES:-$(job_directive nodes)}
  NODES=${NODES##*-} # 1-2 -> 2, for a dry run
  RANKS_PER_NODE=${SLURM_GPUS_PER_NODE:-$(job_directive gpus-per-node)}
  RANKS_PER_NODE=${RANKS_PER_NODE##*:} # a100:2 -> 2
  JOB_ID=${SLURM_JOB_ID:-${JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}}
  if [[ ! $JOB_ID =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$ ]]; then # records/run_environment.py has the same rule
    job_fail JOB_ID "'$JOB_ID' cannot name files" "give up to 64 letters, digits, . _ or -"
  fi
  if [[ ! ${NUMA_BINDING:-node} =~ ^(node|socket|exclusive|core-complex)$ ]]; then
    job_fail NUMA_BINDING "'$NUMA_BINDING' is unknown" "give node, socket, exclusive or core-complex, or leave it unset"
  fi
  ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1))
  STARTED=$(date -u +%Y-%m-%dT%H:%M:%S+00:00) # the run record has the same format
  RUN_DIR=$PWD/results/.$JOB_ID               # files that the parts of this job exchange
  BANDWIDTH_FILE=$RUN_DIR/bandwidth.json
  job_set_threads
  job_check_folder
  if [[ $DRY_RUN = 1 ]]; then
    MASTER_ADDR=FIRST_NODE MASTER_PORT=PORT
    echo "$EXPERIMENT: site $SITE, $NODES node(s) x $RANKS_PER_NODE rank(s)"
    return 0
  fi
  job_check_node
  mkdir -p log gpu_memory cpu_memory "$RUN_DIR" ||
    job_fail "$PWD" "it cannot be written" "free disk space, or check its permissions" 3
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    job_keep_log
  fi
  # Refuse a second script with the same id, for example in the same salloc. This script and its children hold the lock
  # as long as they live. A restarted job takes no lock: a file server may still hold the lock of a failed node
  if [[ $ATTEMPT = 1 ]]; then
    exec {lock}<"$RUN_DIR"
    local held=0 # on a file system without locks, flock ends with a code other than 99, and the job continues
    flock --nonblock --conflict-exit-code 99 "$lock" || held=$?
    if [[ $held = 99 ]]; then
      job_fail JOB_ID "another run of $JOB_ID is writing its files" "give another JOB_ID, or wait until that run ends"
    fi
  fi
  rm -rf "${RUN_DIR:?}"/* "$RUN_DIR"/.ranks_* || true # files of an attempt whose node failed
  trap job_finish EXIT
  job_trap_signals
  if [[ -n $(find results -maxdepth 1 -name '.?*' ! -name ".$JOB_ID" ! -name '.ranks_*') ]]; then
    job_python end_of_job --sweep || true # complete the records of killed jobs
  fi
  job_set_rendezvous
  job_skip_steps
  JOB_OVERRIDES=$(job_overrides)
  # Run git here, for records/git_state.py. A large training would fork to start git, and a memory log may count its
  # memory twice during the fork
  timeout 20 git -C "$ROOT" status --porcelain=v2 --branch -z >"$RUN_DIR/git_status" 2>/dev/null || true
  echo "job $JOB_ID of $EXPERIMENT: site $SITE, $NODES node(s) x $RANKS_PER_NODE rank(s), rendezvous $MASTER_ADDR:$MASTER_PORT"
  echo "nodes: ${ALL_NODES//$'\n'/ }"
  if [[ -z ${CUDA_VISIBLE_DEVICES-unset} ]] && command -v nvidia-smi >/dev/null; then
    echo "GPUs are hidden from this job (site $SITE); to use one, put CUDA_VISIBLE_DEVICES=0 before the command"
  fi
}

job_note_origin() { # ORIGIN: note it for each variable that is new or has changed since the last call
  local name
  for name in $(compgen -e); do
    if [[ ${SEEN[$name]-} != "${!name-}" ]]; then
      SEEN[$name]=${!name}
      ORIGINS[$name]=$1
    fi
  done
}

job_knob_origins() { # set KNOB_ORIGINS to VARIABLE=ORIGIN of each knob that is set; the training prints them
  local knob
  job_note_origin experiment
  KNOB_ORIGINS=""
  for knob in $(python "$ROOT/scripts/config.py" | cut -d' ' -f1); do
    [[ -z ${ORIGINS[$knob]-} ]] || KNOB_ORIGINS+="$knob=${ORIGINS[$knob]} "
  done
}

job_directive() { # NAME: print the value of "#SBATCH --NAME=" in the .slurm file, or 1 if there is no such line
  local line
  line=$(grep -m1 -E "^#SBATCH --$1=[^ ]" "$0" || echo "=1")
  [[ $line =~ =([^ ]+) ]]
  printf '%s' "${BASH_REMATCH[1]##*:}"
}

job_python() { # MODULE ARGS...: run a module of scripts/job
  local -r module=job.$1
  shift
  # -P keeps the experiment's folder off the module path: a user's file there could have the name of a module
  PYTHONPATH=$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH} python -P -m "$module" "$@"
}

job_keep_log() { # also write the output into the log, as Slurm does, and continue when the terminal is closed
  local -r log=log/$(job_directive job-name)_$JOB_ID.out
  exec > >(job_ignore_signals && exec tee -p -a "$log") 2> >(job_ignore_signals && exec tee -p -a "$log" >&2)
}

job_ignore_signals() { # for processes that must write the end of a log or record
  trap '' TERM INT HUP USR1 USR2 PIPE
}

job_set_threads() {
  local -r installed=$(nproc)
  local cpus=${SLURM_CPUS_ON_NODE:-$installed}
  cpus=$(((cpus < installed ? cpus : installed) / RANKS_PER_NODE))
  # torchrun would set one thread, which makes an optimizer step on the CPU very slow. If NUMA_BINDING leaves a rank
  # fewer CPUs, launch.py lowers this number
  : "${OMP_NUM_THREADS:=$((cpus > 0 ? cpus : 1))}"
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05, srun does not inherit this value
  fi
}

job_set_rendezvous() { # the ranks meet at the address of this node on the route to the second node
  ALL_NODES=$(hostname)
  if [[ $NODES -gt 1 ]]; then
    ALL_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  fi
  local found other=()
  if [[ $NODES -gt 1 && -z ${MASTER_ADDR:-} ]]; then
    other=("$(sed -n 2p <<<"$ALL_NODES")")
  fi
  found=$(job_python master_address "$JOB_ID" "${other[@]}") || exit # ADDRESS PORT
  : "${MASTER_ADDR:=${found% *}}"
  MASTER_PORT=${found#* }
}

job_overrides() { # print the differences between the submission and the directives of the .slurm file
  local -r nodes=$(job_directive nodes) gpus=$(job_directive gpus-per-node)
  local text=""
  [[ ${nodes##*-} = "$NODES" ]] || text+=";nodes: $NODES instead of $nodes"
  [[ $gpus = "$RANKS_PER_NODE" ]] || text+=";gpus-per-node: $RANKS_PER_NODE instead of $gpus"
  printf '%s' "${text#;}"
}

# 2. Functions for the .slurm files

run_python() {
  job_note_no_binding python
  job_knob_origins
  job_on_this_node python "$@"
}

run_torchrun() {
  job_knob_origins
  # Use the static rendezvous: c10d executes code that anybody sends to its store, and finds the first node only by name
  local -r launch=(python "$ROOT/scripts/launch.py" --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE"
    --rdzv-backend=static --rdzv-id="$JOB_ID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
    ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"})
  if [[ $NODES -gt 1 ]]; then
    job_srun 1 "${launch[@]}" "$@"
  else
    job_on_this_node "${launch[@]}" "$@"
  fi
}

run_srun() {
  if [[ -z ${SLURM_JOB_ID:-} && $DRY_RUN = 0 ]]; then
    echo "this is not a Slurm job: torchrun starts the $RANKS_PER_NODE ranks instead of srun"
    run_torchrun "$@"
  else
    job_note_no_binding srun
    job_knob_origins
    job_srun "$RANKS_PER_NODE" python "$@"
  fi
}

job_note_no_binding() { # PROGRAM: say that it starts the training without NUMA_BINDING
  [[ -z ${NUMA_BINDING:-} ]] || echo "NUMA_BINDING=$NUMA_BINDING has no effect: $1 starts this training, and only torchrun binds ranks"
}

check_bandwidth() { # no memory loggers run, because their files belong to the training
  # srun starts the ranks: torchrun would need seconds to import PyTorch, for a test of half a second. The .slurm files
  # for torchrun request one task per node, but the test needs one per GPU. So tasks share the CPUs (SLURM_OVERCOMMIT)
  NUMA_BINDING="" LOGGERS=no SLURM_OVERCOMMIT=1 SRUN_CPUS_PER_TASK=1 run_srun "$ROOT/scripts/measure_bandwidth.py" --output "$BANDWIDTH_FILE"
}

job_on_this_node() { # COMMAND
  if [[ $DRY_RUN = 1 ]]; then
    job_show "$@"
    return 0
  fi
  job_run job_start bash "$EXPERIMENTS_FOLDER/job.sh" on_node "$@"
}

job_srun() { # TASKS COMMAND: start this number of tasks on each node
  local -r tasks=$1
  shift
  if [[ $DRY_RUN = 1 ]]; then
    job_show srun --nodes="$NODES" --ntasks-per-node="$tasks" "$@"
    return 0
  fi
  rm -f "$RUN_DIR"/joining_* # notes of the bandwidth test, by distributed/rendezvous.py
  # Without --kill-on-bad-exit, the other ranks would wait forever for a failed rank
  job_run srun --nodes="$NODES" --ntasks=$((NODES * tasks)) --ntasks-per-node="$tasks" --kill-on-bad-exit=1 --cpu-bind=none \
    bash "$EXPERIMENTS_FOLDER/job.sh" on_node "$@"
}

job_show() { # COMMAND: show it in a dry run. For a training run, also check its settings and estimate its memory
  printf '%q ' "$@"
  echo
  while [[ $# -gt 0 && $1 != "$ROOT/scripts/train.py" ]]; do
    shift
  done
  if [[ $# -gt 0 ]]; then
    local -r memory=${SBATCH_MEM_PER_NODE:-$(job_directive mem)}
    local available=(${GPU_MEMORY:+--gpu_memory "$GPU_MEMORY"})
    [[ $memory != *G ]] || available+=(--cpu_memory "${memory%G}")
    python "$ROOT/scripts/estimate_memory.py" --knobs --gpus $((NODES * RANKS_PER_NODE)) --nodes "$NODES" "${available[@]}" "${@:2}"
  fi
}

# 3. On each node: the command and two memory loggers

job_on_node() { # COMMAND
  job_set_up_node "$@"
  job_start "$@" &
  local -r pid=$!
  local loggers=()
  if job_can_log psrecord "$CPU_LOG"; then
    job_start_logger psrecord "${ALL_TASKS:-$pid}" --include-children --interval "$LOG_INTERVAL" --log >(job_append "$CPU_LOG") &
    loggers+=("psrecord=$!")
  fi
  if job_can_log nvidia-smi "$GPU_LOG" && job_choose_gpus; then
    job_start_logger nvidia-smi "${GPUS[@]}" \
      --query-gpu=timestamp,index,name,memory.used,memory.total,power.draw,utilization.gpu --format=csv,nounits \
      -l "$LOG_INTERVAL" >>"$GPU_LOG" &
    loggers+=("nvidia-smi=$!")
  fi
  # on_node.py replaces this shell, waits for the command, passes signals on to it, and stops the loggers
  exec python -P "$ROOT/scripts/job/on_node.py" "$HOST" "$ROLE" "$pid" "${loggers[@]}"
}

job_start() { # COMMAND: replace a subshell by it. The kernel ends it when the parent shell ends, even by SIGKILL
  exec python -P "$ROOT/scripts/job/end_with_parent.py" "$@"
}

job_start_logger() { # COMMAND: let only TERM end it, because Slurm may send other signals to all processes of a job
  trap '' INT HUP USR1 USR2
  job_start "$@" 2>/dev/null
}

job_append() { # FILE: append stdin to it. psrecord itself would overwrite the log of an earlier attempt
  job_ignore_signals
  exec cat >>"$1"
}

job_set_up_node() { # COMMAND
  HOST=${SLURMD_NODENAME:-$(hostname)}
  ROLE="rank ${SLURM_PROCID:-0}"
  [[ $* != *scripts/launch.py* ]] || ROLE="launcher ${SLURM_PROCID:-0}"
  local -r log=memory_log_$JOB_ID$([[ $NODES = 1 ]] || echo "_$HOST")
  CPU_LOG=cpu_memory/cpu_$log.txt
  GPU_LOG=gpu_memory/gpu_$log.csv
  export PET_NODE_RANK=${SLURM_NODEID:-0} # torchrun's --node-rank
  if [[ $NODES -gt 1 ]]; then
    job_gloo_interface
  fi
  if [[ ${SLURM_STEP_NUM_TASKS:-1} -gt $NODES ]]; then
    # srun has started several tasks on this node; psrecord logs all of them through their parent slurmstepd
    ALL_TASKS=$PPID
  fi
}

job_can_log() { # PROGRAM FILE: succeed in a node's first task if the logger is installed; if not, note the missing file
  if [[ $LOGGERS != yes || ${SLURM_LOCALID:-0} != 0 ]]; then
    return 1
  elif ! command -v "$1" >/dev/null; then
    job_note_missing "$1 is not installed on $HOST: no $2"
    return 1
  fi
}

job_choose_gpus() { # set GPUS for nvidia-smi, which ignores CUDA_VISIBLE_DEVICES and also shows the GPUs of other jobs
  local -r visible=${CUDA_VISIBLE_DEVICES-unset}
  GPUS=()
  if [[ -z $visible || $visible = -1 || $visible = NoDevFiles ]]; then
    job_note_missing "CUDA_VISIBLE_DEVICES is '$visible' on $HOST, the job sees no GPU: no log of GPU memory"
    return 1
  elif [[ $visible = unset || $visible = *MIG* ]]; then
    job_note_missing "CUDA_VISIBLE_DEVICES is $visible on $HOST: the GPU log holds all GPUs that nvidia-smi shows"
  else
    GPUS=(-i "$(cut -d, -f"1-$RANKS_PER_NODE" <<<"$visible")")
  fi
}

job_note_missing() { # TEXT: note for the summary what a log lacks. A full disk loses the note, and the job continues
  { echo "$1" >>"$RUN_DIR/missing_$HOST"; } 2>/dev/null || true
}

# 4. A stop

job_run() { # COMMAND: run it and return its exit status. During that time, job_stop passes signals on to it
  "$@" &
  CHILD=$!
  if [[ $STOPPED = yes ]]; then # a signal came before there was a child
    kill -TERM "$CHILD" 2>/dev/null || true
  fi
  # Wait with `read`, which a signal interrupts. During `wait`, a signal may make bash lose the exit status of the child
  while kill -0 "$CHILD" 2>/dev/null; do
    read -rt 0.2 -u "$EMPTY_PIPE" || true
  done
  local code=0
  wait "$CHILD" || code=$?
  CHILD=""
  return "$code"
}

job_trap_signals() {
  # job_run reads from this pipe. Open it before the traps are set: with a trap, bash may fail to parse <(...)
  exec {EMPTY_PIPE}<> <(:)
  # Pass INT and HUP on as TERM: a process in the background may ignore INT, and HUP has another meaning for srun
  trap 'job_stop TERM' TERM INT HUP USR2
  trap 'job_stop USR1' USR1
  trap '' PIPE # continue if nobody reads the output
}

job_stop() { # SIGNAL: pass it on to the training, which saves a checkpoint and stops
  STOPPED=yes
  if [[ $1 = USR1 ]]; then
    WARNED=yes
  else
    CANCELLED=yes
  fi
  [[ -z $CHILD ]] || kill -"$1" "$CHILD" 2>/dev/null || true
  # Note the signal in the record now: if the training does not react, Slurm kills it together with this script
  job_python end_of_job "$JOB_ID" --signal --exit-code 143 --since "$STARTED" || true
}

# 5. The end of a job

job_finish() { # runs on EXIT. After a failed training, errexit ends the script, so this function runs, too
  local code=$?
  trap - EXIT
  set +e             # later failures, such as a write to a full disk, must not change the exit code
  job_ignore_signals # a second signal must not interrupt this function
  local timeout=()
  if [[ $STOPPED = yes && $(timeout 5 scontrol show job "${SLURM_JOB_ID:-0}" 2>&1) = *Reason=TimeLimit* ]]; then
    timeout=(--timeout)
  fi
  # Take the exit code from the training's own record: srun also returns 0 for ranks that were slow to stop
  local ended=0
  job_python end_of_job "$JOB_ID" --exit-code "$code" "${timeout[@]}" --since "$STARTED" \
    --ranks $((NODES * RANKS_PER_NODE)) || ended=$?
  rm -rf "$RUN_DIR" || true # rm fails if a rank still writes there
  job_upload
  # A code above 128 means that the training was killed before it had saved. It will resume from an earlier checkpoint
  if [[ $WARNED = yes && $CANCELLED = no && ${REQUEUE:-0} = 1 ]] && ((ended == SAVED || ended > 128)); then
    job_requeue
  fi
  exit "$ended"
}

job_upload() { # upload the job's offline runs to Weights & Biases, if the site says that nodes have network access
  if [[ ${WANDB_ONLINE:-0} != 1 || ! -d wandb/$JOB_ID ]]; then
    return 0 # in a trap, a plain return would give the status from before the trap
  fi
  # A stopped job has no time for an upload. The subshell resets the traps, so that a signal can end the upload
  if [[ $STOPPED = yes ]] || ! (trap - TERM INT HUP && exec python "$ROOT/scripts/tracking.py" "$JOB_ID"); then
    printf 'not uploaded to Weights & Biases; to upload later, run in this folder: python %q %q\n' \
      "$ROOT/scripts/tracking.py" "$JOB_ID"
  fi
}

job_requeue() { # let Slurm start the job again under the same id; the training then resumes from its checkpoint
  if ((ATTEMPT > MAX_RESTARTS)); then
    echo "not requeued: this job was already restarted $MAX_RESTARTS times (MAX_RESTARTS)"
  elif ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "not requeued: Slurm refused; if your cluster does not requeue jobs by default, submit with SBATCH_REQUEUE=1"
  fi
}

# 6. Special cases: only some clusters need these functions

job_check_folder() { # a script that is started in another folder would write its results there, under a wrong name
  local script=$0
  if [[ -n ${SLURM_JOB_ID:-} && $0 != *.slurm ]]; then # Slurm runs a copy of the script
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n '/^ *Command=/{s///p;q}') || true
    [[ $script = /* ]] || script=${SLURM_SUBMIT_DIR:-$PWD}/$script
  fi
  if [[ $script = *.slurm* && ! $(dirname "${script%.slurm*}") -ef $PWD ]]; then
    job_fail "$script" "it does not belong to this folder, $PWD" "start it in its own folder"
  fi
}

job_check_node() { # this script must run on the first node: the ranks meet there, and a job on one node trains there
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    [[ $NODES = 1 ]] || job_fail "$(basename "$0")" "it needs $NODES nodes, but is not in a Slurm job" "submit it with sbatch" 3
    return 0
  fi
  local -r here=${SLURMD_NODENAME:-$(hostname)} # many sites open the shell of salloc on the login node
  local first
  first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$here}" 2>/dev/null | head -n 1) || true
  if [[ -n $first && ${here%%.*} != "${first%%.*}" ]]; then
    job_fail "$(basename "$0")" "it must run on $first, the first node of job $SLURM_JOB_ID, and this shell is on $here" \
      "open a shell there (srun --overlap --nodes=1 --ntasks=1 --pty bash), or submit it with sbatch" 3
  fi
}

job_skip_steps() { # in a restarted job, use up the step numbers of earlier attempts
  # Once a minute, Slurm tells a node that was down to end the old step 1 of this job. That would end a new step 1, too
  local step
  for ((step = 0; step < 2 * (ATTEMPT - 1) && NODES > 1; step++)); do # two steps per attempt: bandwidth test, training
    srun --quiet --nodes=1 --ntasks=1 true || true
  done
}

job_gloo_interface() { # name the interface if this node's own name means 127.0.1.1, where gloo would listen otherwise
  if [[ -z ${GLOO_SOCKET_IFNAME:-} && $(getent hosts "$(hostname)") = 127.* ]]; then
    local name
    name=$(ip -o address | awk -v own="$MASTER_ADDR/" 'index($4, own) == 1 { print $2 }') || true # on the first node
    : "${name:=$(ip -o route get "$MASTER_ADDR" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')}"
    [[ -z $name ]] || export GLOO_SOCKET_IFNAME=$name
  fi
}

# 7. Entry points: this file is started on each node, and sourced by each .slurm file

if [[ ${1:-} = on_node && ${BASH_SOURCE[0]} = "$0" ]]; then # the part of a job that runs on each node
  shift
  job_on_node "$@"
fi

# A job of submit.sh --snapshot reads this file twice. The first time it notes the experiment's name and sources the
# snapshot's copy of this file, which does the rest
if [[ ! $EXPERIMENTS_FOLDER -ef ${SNAPSHOT:-none}/experiments ]]; then
  cd -P . # PWD must have no symbolic links, as EXPERIMENTS_FOLDER has none
  export EXPERIMENT=experiments/${PWD#"$EXPERIMENTS_FOLDER"/}
  if [[ -n ${SNAPSHOT:-} ]]; then
    source "$SNAPSHOT/experiments/job.sh" # results still go into the current folder
    return
  fi
fi
# Export all variables that this file and the .slurm file set from here on. In this way the knobs reach the training,
# and RUN_DIR, JOB_ID, NODES and others reach this file on each node
set -a
job_note_origin submission
job_find_site
job_load_site
job_note_origin site
: "${DRY_RUN:=0}"
: "${LOGGERS:=yes}"
: "${LOG_INTERVAL:=5}"
: "${REQUIRE_GPU:=1}"
: "${JOIN_TIMEOUT:=300}"
: "${MAX_RESTARTS:=10}"
: "${CUDA_DEVICE_ORDER:=PCI_BUS_ID}" # number GPUs as nvidia-smi and Slurm do; CUDA itself begins with the fastest GPU
: "${TORCH_CPP_LOG_LEVEL:=ERROR}"    # with WARNING, PyTorch logs each socket that is closed
if [[ $DRY_RUN != 0 ]]; then
  DRY_RUN=1 # any other value, such as true, means 1
  if [[ -n ${SLURM_JOB_ID:-} ]]; then
    echo "warning: DRY_RUN has no effect in a Slurm job" >&2
    DRY_RUN=0
  fi
fi
job_prepare
