#!/usr/bin/env bash
# What all experiments share. A .slurm file sources this: section 7 below then loads the site, exports all variables that are
# set from there on (knobs reach Python as variables), and calls job_prepare. Then the .slurm calls one of these, or two
#   run_python FILE ARGS...     one process
#   run_torchrun FILE ARGS...   one process per GPU; torchrun (in scripts/launch.py) starts them, once per node
#   run_srun FILE ARGS...       one process per GPU; srun starts them, no torchrun
#   check_bandwidth             all-reduce over the job's ranks first; too slow ends the job
#   DRY_RUN=1 bash X.slurm      shows the site, the knobs and the commands, checks them, and writes nothing
# How a job lives:
#   the .slurm file on the first node    job_prepare, then what it calls, then job_finish, whatever happened
#     run_torchrun, for example          starts "job.sh on_node", by srun if there are several nodes
#       on each node (section 3)         the command, and two memory loggers next to it
# The job's exit status is that of the rank that failed first; if none did, the one in the run record.
set -euo pipefail +o posix # sh can be bash in POSIX mode, which has no <(...) before bash 5.1

EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd) # -P: a link may lead to the experiment's folder
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh" # also job_fail: error line of NAME, WHAT, WAY OUT, exit code (2)

CHILD=""                      # process to which signals are passed on
STOPPED=no                    # a signal came
WARNED=no                     # it was USR1, the site's warning that time is running out
CANCELLED=no                  # it was TERM, INT, HUP or USR2: somebody has ended the job
SAVED=75                      # exit code of a training that was stopped and has saved a checkpoint
declare -A SEEN=() ORIGINS=() # variables as they were when job_note_origin looked last, and who has set them

# 1. Before the training

job_prepare() {
  NODES=${SLURM_JOB_NUM_NODES:-$(job_directive nodes)}
  RANKS_PER_NODE=${SLURM_GPUS_PER_NODE:-$(job_directive gpus-per-node)}
  RANKS_PER_NODE=${RANKS_PER_NODE##*:} # a100:2 -> 2
  JOB_ID=${SLURM_JOB_ID:-${JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}}
  if [[ ! $JOB_ID =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$ ]]; then # as records/writer.py
    job_fail JOB_ID "'$JOB_ID' cannot name files" "give up to 64 letters, digits, . _ or -"
  fi
  ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1))
  STARTED=$(date -u +%Y-%m-%dT%H:%M:%S+00:00) # as in the run record
  RUN_DIR=$PWD/results/.$JOB_ID               # what the parts of this job tell each other
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
    job_fail "$PWD" "it cannot be written" "free disk space, or see its permissions" 3
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    job_keep_log
  fi
  if [[ $ATTEMPT = 1 ]]; then # a file server may keep the lock of an attempt whose node failed
    exec {lock}<"$RUN_DIR"    # as long as this script and its children live; two scripts in one salloc have one id, too
    local held=0              # a file system without locks gives another code, and there it goes on
    flock --nonblock --conflict-exit-code 99 "$lock" || held=$?
    if [[ $held = 99 ]]; then
      job_fail JOB_ID "another run of $JOB_ID is writing its files" "give another one, or wait for its end"
    fi
  fi
  rm -rf "${RUN_DIR:?}"/* "$RUN_DIR"/.ranks_* || true # what an attempt left whose node failed
  trap job_finish EXIT
  job_listen
  if [[ -n $(find results -maxdepth 1 -name '.?*' ! -name ".$JOB_ID" ! -name '.ranks_*') ]]; then
    job_python end_of_job --sweep || true # records of jobs that ended without a word
  fi
  job_set_rendezvous
  job_skip_steps
  JOB_OVERRIDES=$(job_overrides)
  # records/git_state.py reads this. If a large training started git, a memory log could count the training twice
  timeout 20 git -C "$ROOT" status --porcelain=v2 --branch -z >"$RUN_DIR/git_status" 2>/dev/null || true
  echo "job $JOB_ID of $EXPERIMENT: site $SITE, $NODES node(s) x $RANKS_PER_NODE rank(s), rendezvous $MASTER_ADDR:$MASTER_PORT"
  echo "nodes: ${ALL_NODES//$'\n'/ }"
  if [[ -z ${CUDA_VISIBLE_DEVICES-unset} ]] && command -v nvidia-smi >/dev/null; then
    echo "GPUs are hidden from this job (site $SITE): CUDA_VISIBLE_DEVICES=0 before the command shows one"
  fi
}

job_note_origin() { # WHO: is noted as the one who set each variable that is new, or another, since the last call
  local name
  for name in $(compgen -e); do
    if [[ ${SEEN[$name]-} != "${!name-}" ]]; then
      SEEN[$name]=${!name}
      ORIGINS[$name]=$1
    fi
  done
}

job_knob_origins() { # sets KNOB_ORIGINS: VARIABLE=WHO of each knob that is set; the training prints it
  local knob
  job_note_origin experiment
  KNOB_ORIGINS=""
  for knob in $(python "$ROOT/scripts/config.py" | cut -d' ' -f1); do
    [[ -z ${ORIGINS[$knob]-} ]] || KNOB_ORIGINS+="$knob=${ORIGINS[$knob]} "
  done
}

job_directive() { # NAME: value behind "#SBATCH --NAME=" of the script that runs, 1 without one
  local line
  line=$(grep -m1 -E "^#SBATCH --$1=[^ ]" "$0" || echo "=1")
  [[ $line =~ =([^ ]+) ]]
  printf '%s' "${BASH_REMATCH[1]##*:}"
}

job_python() { # MODULE ARGS...: one of scripts/job
  local -r module=job.$1
  shift
  # -P: not the experiment's folder first, where a file of a user may have one of the modules' names
  PYTHONPATH=$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH} python -P -m "$module" "$@"
}

job_keep_log() { # as Slurm would: what is printed goes into the log, too, also when the terminal is closed
  local -r log=log/$(job_directive job-name)_$JOB_ID.out
  exec > >(job_ignore_signals && exec tee -p -a "$log") 2> >(job_ignore_signals && exec tee -p -a "$log" >&2)
}

job_ignore_signals() { # for what must live on to write the end
  trap '' TERM INT HUP USR1 USR2 PIPE
}

job_set_threads() {
  local -r installed=$(nproc)
  local cpus=${SLURM_CPUS_ON_NODE:-$installed}
  cpus=$(((cpus < installed ? cpus : installed) / RANKS_PER_NODE))
  # torchrun would set 1, and an optimizer step on the CPU would crawl
  : "${OMP_NUM_THREADS:=$((cpus > 0 ? cpus : 1))}"
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 srun no longer inherits it
  fi
}

job_set_rendezvous() { # where the ranks meet: on the first node, where this runs, by its address on the way to the second
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

job_overrides() { # what was submitted otherwise than the script says
  local -r nodes=$(job_directive nodes) gpus=$(job_directive gpus-per-node)
  local text=""
  [[ $nodes = "$NODES" ]] || text+=";nodes: $NODES instead of $nodes"
  [[ $gpus = "$RANKS_PER_NODE" ]] || text+=";gpus-per-node: $RANKS_PER_NODE instead of $gpus"
  printf '%s' "${text#;}"
}

# 2. What a .slurm file calls

run_python() {
  job_knob_origins
  job_on_this_node python "$@"
}

run_torchrun() {
  job_knob_origins
  # static: the other one (c10d) executes what anybody sends to its store, and looks for the first node by name
  local -r launch=(python "$ROOT/scripts/launch.py" --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE"
    --rdzv-backend=static --rdzv-id="$JOB_ID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
  if [[ $NODES -gt 1 ]]; then
    job_srun 1 "${launch[@]}" "$@"
  else
    job_on_this_node "${launch[@]}" "$@"
  fi
}

run_srun() {
  if [[ -z ${SLURM_JOB_ID:-} && $DRY_RUN = 0 ]]; then
    echo "no Slurm here: torchrun starts the $RANKS_PER_NODE ranks instead of srun"
    run_torchrun "$@"
  else
    job_knob_origins
    job_srun "$RANKS_PER_NODE" python "$@"
  fi
}

check_bandwidth() { # without memory loggers: those files belong to the training
  # by srun: torchrun would import PyTorch once more, seconds for a test of half a second. Scripts for torchrun ask for one
  # task per node, here there is one per GPU, so they share that task's CPUs (SLURM_OVERCOMMIT)
  LOGGERS=no SLURM_OVERCOMMIT=1 SRUN_CPUS_PER_TASK=1 run_srun "$ROOT/scripts/measure_bandwidth.py" --output "$BANDWIDTH_FILE"
}

job_on_this_node() { # COMMAND
  if [[ $DRY_RUN = 1 ]]; then
    job_show "$@"
    return 0
  fi
  job_run job_start bash "$EXPERIMENTS_FOLDER/job.sh" on_node "$@"
}

job_srun() { # TASKS COMMAND: start so many tasks on each node
  local -r tasks=$1
  shift
  if [[ $DRY_RUN = 1 ]]; then
    job_show srun --nodes="$NODES" --ntasks-per-node="$tasks" "$@"
    return 0
  fi
  rm -f "$RUN_DIR"/joining_* # the nodes' notes of the bandwidth test (distributed/rendezvous.py)
  # --kill-on-bad-exit: without it, the other ranks wait for a failed rank forever
  job_run srun --nodes="$NODES" --ntasks=$((NODES * tasks)) --ntasks-per-node="$tasks" --kill-on-bad-exit=1 --cpu-bind=none \
    bash "$EXPERIMENTS_FOLDER/job.sh" on_node "$@"
}

job_show() { # COMMAND: of a dry run. A training is checked as train.py checks it, and its memory estimated
  printf '%q ' "$@"
  echo
  while [[ $# -gt 0 && $1 != "$ROOT/scripts/train.py" ]]; do
    shift
  done
  if [[ $# -gt 0 ]]; then
    local -r memory=${SBATCH_MEM_PER_NODE:-$(job_directive mem)}
    local there=(${GPU_MEMORY:+--gpu_memory "$GPU_MEMORY"})
    [[ $memory != *G ]] || there+=(--cpu_memory "${memory%G}")
    python "$ROOT/scripts/estimate_memory.py" --knobs --gpus $((NODES * RANKS_PER_NODE)) --nodes "$NODES" "${there[@]}" "${@:2}"
  fi
}

# 3. On each node: the command, and two memory loggers next to it

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
      --query-gpu=timestamp,index,name,memory.used,memory.total --format=csv,nounits -l "$LOG_INTERVAL" >>"$GPU_LOG" &
    loggers+=("nvidia-smi=$!")
  fi
  # on_node.py replaces this shell: it waits for the command, passes signals on to it, and stops the loggers
  exec python -P "$ROOT/scripts/job/on_node.py" "$HOST" "$ROLE" "$pid" "${loggers[@]}"
}

job_start() { # COMMAND, in the place of a subshell. The kernel ends it when its parent shell dies, even by SIGKILL
  exec python -P "$ROOT/scripts/job/with_parent.py" "$@"
}

job_start_logger() { # COMMAND. All processes of a job may get a signal, but only TERM ends a logger
  trap '' INT HUP USR1 USR2
  job_start "$@" 2>/dev/null
}

job_append() { # FILE: psrecord itself would overwrite the log of an earlier attempt
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
    # srun has started several tasks on this node: psrecord logs all of them, by their parent slurmstepd
    ALL_TASKS=$PPID
  fi
}

job_can_log() { # PROGRAM FILE: true for an installed program in the first task of a node. Without it the training continues
  if [[ $LOGGERS != yes || ${SLURM_LOCALID:-0} != 0 ]]; then
    return 1
  elif ! command -v "$1" >/dev/null; then
    job_missing "$1 is not installed on $HOST: no $2"
    return 1
  fi
}

job_choose_gpus() { # sets GPUS: nvidia-smi shows those of other jobs as well, and does not look at CUDA_VISIBLE_DEVICES
  local -r visible=${CUDA_VISIBLE_DEVICES-unset}
  GPUS=()
  if [[ -z $visible || $visible = -1 || $visible = NoDevFiles ]]; then
    job_missing "CUDA_VISIBLE_DEVICES is '$visible' on $HOST, the job sees no GPU: no log of GPU memory"
    return 1
  elif [[ $visible = unset || $visible = *MIG* ]]; then
    job_missing "CUDA_VISIBLE_DEVICES is $visible on $HOST: the GPU log holds all GPUs that nvidia-smi shows"
  else
    GPUS=(-i "$(cut -d, -f"1-$RANKS_PER_NODE" <<<"$visible")")
  fi
}

job_missing() { # TEXT: what a log lacks, for the summary. On a full disk the note is lost, and the job continues
  { echo "$1" >>"$RUN_DIR/missing_$HOST"; } 2>/dev/null || true
}

# 4. A stop

job_run() { # COMMAND: its exit status. Meanwhile job_stop passes signals on to it
  "$@" &
  CHILD=$!
  if [[ $STOPPED = yes ]]; then # a signal came before there was a child
    kill -TERM "$CHILD" 2>/dev/null || true
  fi
  # a signal interrupts read, and then its trap runs. In wait bash may lose the status of a child that ends meanwhile
  while kill -0 "$CHILD" 2>/dev/null; do
    read -rt 0.2 -u "$EMPTY_PIPE" || true
  done
  local code=0
  wait "$CHILD" || code=$?
  CHILD=""
  return "$code"
}

job_listen() {
  exec {EMPTY_PIPE}<> <(:) # for job_run; nothing is ever written to it. With a trap, bash may fail to parse <(...)
  # a process in the background may ignore INT, and srun takes HUP for something else
  trap 'job_stop TERM' TERM INT HUP USR2
  trap 'job_stop USR1' USR1
  trap '' PIPE # continue if nobody reads the output
}

job_stop() { # SIGNAL: for the training, which saves and stops
  STOPPED=yes
  if [[ $1 = USR1 ]]; then
    WARNED=yes
  else
    CANCELLED=yes
  fi
  [[ -z $CHILD ]] || kill -"$1" "$CHILD" 2>/dev/null || true
  # The record says so at once: if the training does not react, Slurm kills it, and this script with it
  job_python end_of_job "$JOB_ID" --signal --exit-code 143 --since "$STARTED" || true
}

# 5. The end of a job

job_finish() { # on EXIT, also when the training failed: errexit ends the script behind a command that returns its status
  local code=$?
  trap - EXIT
  set +e             # nothing that fails from here on may change the exit code: a full disk, for example, takes no message
  job_ignore_signals # a second one must not interrupt this
  local timeout=()
  if [[ $STOPPED = yes && $(timeout 5 scontrol show job "${SLURM_JOB_ID:-0}" 2>&1) = *Reason=TimeLimit* ]]; then
    timeout=(--timeout)
  fi
  # it ends with what the training wrote down itself: srun says 0, too, of ranks that were slow to stop
  local ended=0
  job_python end_of_job "$JOB_ID" --exit-code "$code" "${timeout[@]}" --since "$STARTED" \
    --ranks $((NODES * RANKS_PER_NODE)) || ended=$?
  rm -rf "$RUN_DIR" || true # a rank may still write there
  job_upload
  # above 128: killed while it saved, or before. It goes on from the checkpoint before
  if [[ $WARNED = yes && $CANCELLED = no && ${REQUEUE:-0} = 1 ]] && ((ended == SAVED || ended > 128)); then
    job_requeue
  fi
  exit "$ended"
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

job_requeue() { # Slurm starts the job again, under the same id: it goes on from its checkpoint
  if ((ATTEMPT > MAX_RESTARTS)); then
    echo "not requeued: this job was started again $MAX_RESTARTS times (MAX_RESTARTS)"
  elif ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "not requeued: Slurm refused it; where the site's default is not to, submit with SBATCH_REQUEUE=1 set"
  fi
}

# 6. What only some clusters need, and what seldom happens

job_check_folder() { # a script that is started in another folder would put its results there, under a wrong name
  local script=$0
  if [[ -n ${SLURM_JOB_ID:-} && $0 != *.slurm ]]; then # Slurm runs a copy of the script
    script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n '/^ *Command=/{s///p;q}') || true
    [[ $script = /* ]] || script=${SLURM_SUBMIT_DIR:-$PWD}/$script
  fi
  if [[ $script = *.slurm* && ! $(dirname "${script%.slurm*}") -ef $PWD ]]; then
    job_fail "$script" "it is not of this folder, $PWD" "start it in its own folder"
  fi
}

job_check_node() { # this script must run on the first node: the ranks meet there, and a job on one node trains there
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    [[ $NODES = 1 ]] || job_fail "$(basename "$0")" "it needs $NODES nodes, and there is no Slurm here" "submit it with sbatch" 3
    return 0
  fi
  local -r here=${SLURMD_NODENAME:-$(hostname)} # salloc opens its shell on the login node, unless the site has changed that
  local first
  first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-$here}" 2>/dev/null | head -n 1) || true
  if [[ -n $first && ${here%%.*} != "${first%%.*}" ]]; then
    job_fail "$(basename "$0")" "it must run on $first, the first node of job $SLURM_JOB_ID, and this shell is on $here" \
      "open a shell there (srun --overlap --nodes=1 --ntasks=1 --pty bash), or submit it with sbatch" 3
  fi
}

job_skip_steps() { # in a job that was started again: use up the numbers of the steps that its attempts before had
  # Slurm tells a node that was down, once a minute, to end step 1 of this job, and would end this attempt's step 1
  local step
  for ((step = 0; step < 2 * (ATTEMPT - 1) && NODES > 1; step++)); do # two of each attempt: bandwidth test and training
    srun --quiet --nodes=1 --ntasks=1 true || true
  done
}

job_gloo_interface() { # where this node's own name means 127.0.1.1, gloo would listen there: name the interface instead
  if [[ -z ${GLOO_SOCKET_IFNAME:-} && $(getent hosts "$(hostname)") = 127.* ]]; then
    local name
    name=$(ip -o address | awk -v own="$MASTER_ADDR/" 'index($4, own) == 1 { print $2 }') || true # on the first node
    : "${name:=$(ip -o route get "$MASTER_ADDR" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')}"
    [[ -z $name ]] || export GLOO_SOCKET_IFNAME=$name
  fi
}

# 7. The two ways in: what runs when this file is sourced, or started on a node

if [[ ${1:-} = on_node && ${BASH_SOURCE[0]} = "$0" ]]; then # the part of a job that runs on each node
  shift
  job_on_node "$@"
fi

# A job of submit.sh --snapshot reads this file twice: here it notes where the experiment stands, and then sources the
# snapshot's copy of this file, which takes over
if [[ ! $EXPERIMENTS_FOLDER -ef ${SNAPSHOT:-none}/experiments ]]; then
  cd -P . # PWD must have no symbolic links, as EXPERIMENTS_FOLDER has none
  export EXPERIMENT=experiments/${PWD#"$EXPERIMENTS_FOLDER"/}
  if [[ -n ${SNAPSHOT:-} ]]; then
    source "$SNAPSHOT/experiments/job.sh" # results land in this folder all the same
    return
  fi
fi
# Export all that is set from here on, by the .slurm too: so knobs reach the training, and RUN_DIR, JOB_ID, NODES and others
# reach this file on each node
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
: "${CUDA_DEVICE_ORDER:=PCI_BUS_ID}" # CUDA would count from the fastest GPU, nvidia-smi and Slurm count along the bus
: "${TORCH_CPP_LOG_LEVEL:=ERROR}"    # WARNING tells of each socket that is closed
if [[ $DRY_RUN != 0 ]]; then
  DRY_RUN=1 # also DRY_RUN=true
  if [[ -n ${SLURM_JOB_ID:-} ]]; then
    echo "warning: DRY_RUN has no effect in a Slurm job" >&2
    DRY_RUN=0
  fi
fi
job_prepare
