#!/usr/bin/env bash
# The common part of all experiments, which each .slurm file sources. It loads the site and exports all variables that
# are set from then on, because knobs reach Python as variables. Then the .slurm file calls one of these functions:
#   run_python FILE ARGS...     one process
#   run_torchrun FILE ARGS...   one process per GPU, started by one torchrun per node (in scripts/launch.py)
#   run_srun FILE ARGS...       one process per GPU, started by srun without torchrun
#   check_bandwidth             the next run_ function first measures the network; a slow network ends the job
#   DRY_RUN=1 bash X.slurm      shows the site, the knobs and the commands, checks them, and writes nothing
# Each run_ function starts scripts/run_job.py. Read that file from top to bottom to see a job: its nodes, the bandwidth
# test, the training with two memory loggers on each node, the record of its end, the summary, and the restart.
set -euo pipefail

EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd) # -P: a link may lead to the experiment's folder
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh"

declare -A SEEN=() # values of the variables at the last call of job_note_origin

job_note_origin() { # ORIGIN: note it for each variable that is new or has changed since the last call
  local name
  for name in $(compgen -e); do
    if [[ $name != KNOB_ORIGINS && ${SEEN[$name]-} != "${!name-}" ]]; then
      SEEN[$name]=${!name}
      KNOB_ORIGINS+=" $name=$1" # the training prints the last origin of each knob
    fi
  done
}

run_python() { job_run python "$@"; }
run_torchrun() { job_run torchrun "$@"; }
run_srun() { job_run srun "$@"; }
check_bandwidth() { CHECK_BANDWIDTH=yes; }

job_run() { # python|torchrun|srun FILE ARGS...
  local code=0
  job_note_origin experiment
  EARLIER_SIGNALS=$NOTED_SIGNALS # run_job.py reads these itself
  (trap '' TERM INT HUP USR1 USR2 && exec "$JOB_PYTHON" "$ROOT/scripts/run_job.py" "$@") &
  CHILD=$!
  # Wait with `read`, which a signal interrupts. During `wait`, a signal may make bash lose the exit code of run_job.py
  while kill -0 "$CHILD" 2>/dev/null; do
    read -rt 0.2 -u "$EMPTY_PIPE" || true
  done
  wait "$CHILD" || code=$?
  CHILD="" CHECK_BANDWIDTH=no
  return "$code"
}

job_pass_on() { # NAMES: Slurm sends some signals only to this shell. run_job.py ignores signals until it listens
  local name
  for name in "$@"; do kill -"$name" "$CHILD" 2>/dev/null || true; done
}

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
KNOB_ORIGINS=""
set -a # export all variables that this file and the .slurm file set from here on
job_note_origin submission
job_find_site
job_load_site
job_note_origin site
export JOB_SCRIPT=$0 JOB_SHELL=$$ CHECK_BANDWIDTH=no
JOB_ID=${SLURM_JOB_ID:-${JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}}
CHILD="" NOTED_SIGNALS="" EARLIER_SIGNALS=""
: "${LOGGERS:=yes}" "${LOG_INTERVAL:=5}" "${REQUIRE_GPU:=1}" "${JOIN_TIMEOUT:=300}" "${MAX_RESTARTS:=10}"
: "${CUDA_DEVICE_ORDER:=PCI_BUS_ID}" # number GPUs as nvidia-smi and Slurm do; CUDA itself begins with the fastest GPU
: "${TORCH_CPP_LOG_LEVEL:=ERROR}"    # with WARNING, PyTorch logs each socket that is closed
exec {EMPTY_PIPE}<> <(:)             # job_run reads from it. With a trap, bash may fail to parse <(...)
# run_job.py sends URG as soon as it listens. Then pass on the signals that came in the meantime
trap 'job_pass_on ${NOTED_SIGNALS#"$EARLIER_SIGNALS"}' URG
for name in TERM INT HUP USR1 USR2; do
  # Pass HUP on as TERM, because run_job.py ignores HUP, as under nohup: a closed terminal sends it to all processes
  # shellcheck disable=SC2064
  trap "NOTED_SIGNALS+=' ${name/HUP/TERM}'; job_pass_on ${name/HUP/TERM}" "$name"
done
