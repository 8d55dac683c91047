#!/usr/bin/env bash
# Submit one experiment, a family of them, or all:
#     experiments/submit.sh baseline
#     experiments/submit.sh --chain deepspeed-multi-gpu              # one after another
#     experiments/submit.sh --dry-run deepspeed-single-gpu           # only show: sbatch lines, knobs, commands, memory
#     experiments/submit.sh --snapshot deepspeed-single-gpu/zero_2   # later edits do not reach the queued job
# The target is a path below experiments/, or all. A dry run checks flags, config files and memory, and asks Slurm
# whether it would accept the job. It ends with exit code 2 or 3 if something is wrong. A submission skips jobs that can
# never run, and then ends with exit code 3. Knobs come from the environment:
#     MODEL_NAME=bigscience/bloom-3b experiments/submit.sh deepspeed-single-gpu
set -euo pipefail +o posix # sh can be bash in POSIX mode

EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh"

snapshot() { # copy everything that a job reads, and print the folder of the copy
  local -r folder=$ROOT/snapshots/$(date +%Y%m%d-%H%M%S)-$$
  mkdir -p "$folder"
  local -r without=(--exclude={__pycache__,results,output,cpu_memory,gpu_memory,log,profile})
  tar -C "$ROOT" -cf - "${without[@]}" scripts ds_configs fsdp_configs data experiments pyproject.toml | tar -C "$folder" -xf - ||
    job_fail "$folder" "the snapshot is not complete" "see the message above"
  # records/git_state.py reads this file
  git --no-optional-locks -C "$ROOT" status --porcelain=v2 --branch -z >"$folder/git_status" 2>/dev/null || true
  if [[ -d $ROOT/.venv ]]; then
    ln -s "$ROOT/.venv" "$folder/.venv" # in the job, $ROOT is the snapshot, and site files look for .venv there
  fi
  printf '%s' "$folder"
}

leave_out_large_jobs() { # remove the scripts from `scripts` that need more GPUs per node than the site has
  local found large
  [[ -n ${GPUS_PER_NODE:-} ]] || return 0
  found=$(
    set -a && export GPUS_PER_NODE
    job_load_site >&2 && cd "$ROOT/scripts" && "$JOB_PYTHON" -m job.directives "${scripts[@]}"
  ) || exit
  [[ -n $found ]] || return 0
  mapfile -t scripts < <(printf '%s\n' "${scripts[@]}" | grep -vxF "$found")
  [[ ${#scripts[@]} -gt 0 ]] || job_fail "$target" "it needs more GPUs per node than GPUS_PER_NODE=$GPUS_PER_NODE of the site $SITE" "choose a smaller experiment"
  mapfile -t large <<<"${found//"$EXPERIMENTS_FOLDER"\//}"
  printf 'left out: GPUS_PER_NODE=%s of the site %s is too small for %s\n' "$GPUS_PER_NODE" "$SITE" "${large[*]%/*}" >&2
}

ask_slurm() { # NAME: fail if the script can never run, and warn if it cannot run now. Put Slurm's answer into `answer`
  answer=$(sbatch --test-only "$1" 2>&1) && return
  # Slurm gives the same answer if the cluster has too few nodes and if nodes are only drained
  local -r down=$(sinfo --noheader --states=down,drain,fail,maint ${SBATCH_PARTITION:+--partition="$SBATCH_PARTITION"} --format=%n 2>/dev/null)
  [[ -n $down ]] || return 1
  printf 'warning: %s: Slurm cannot place it now: %s; nodes that are down or drained: %s\n' \
    "${script#"$ROOT"/}" "${answer//$'\n'/ }" "${down//$'\n'/ }" >&2
}

show_progress() { # NUMBER SCRIPT: only on a terminal, because the dry run of all experiments takes minutes
  [[ -t 2 ]] || return 0
  local left="each takes some seconds"
  if (($1 > 1)); then
    left="about $((SECONDS * (${#scripts[@]} - $1 + 1) / ($1 - 1))) seconds left"
  fi
  printf '\ndry run %d of %d (%s): %s\n' "$1" "${#scripts[@]}" "$left" "${2#"$EXPERIMENTS_FOLDER/"}" >&2
}

# 1. The command line

chain=no dry_run=no frozen=no target=""
for argument in "$@"; do
  case $argument in
    --chain) chain=yes ;;
    --dry-run) dry_run=yes ;;
    --snapshot) frozen=yes ;;
    --help | -h)
      sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "$0"
      exit
      ;;
    -*) job_fail "$argument" "unknown option" "see --help" ;;
    *)
      [[ -z $target ]] || job_fail "$argument" "only one target is allowed" "see --help"
      target=$argument
      ;;
  esac
done
[[ -n $target ]] || job_fail "submit.sh" "nothing to submit" "give a family, a folder or all; see --help"

# 2. The experiments

folder=$target # relative to the current folder
[[ $target != *efficiency/group_by_length* ]] || job_fail "$target" "is gone" "efficiency/no_padding (PADDING=none) leaves out all padding"
if [[ $target = all ]]; then
  folder=$EXPERIMENTS_FOLDER
elif [[ $target != .* && -d $EXPERIMENTS_FOLDER/$target ]]; then
  folder=$EXPERIMENTS_FOLDER/$target
fi
folder=$(cd -P "$folder" 2>/dev/null && pwd) || job_fail "$target" "there is no such folder below experiments/" "see ls experiments"
mapfile -d '' scripts < <(find "$folder" -name '*.slurm' -print0 | sort -zV)
[[ ${#scripts[@]} -gt 0 ]] || job_fail "$target" "it holds no .slurm file" "see ls experiments"

# 3. The site's settings for sbatch

job_find_site
# shellcheck source=experiments/sites/laptop.sh
settings=$(source "$SITE_FILE" && export GPUS_PER_NODE && env | sort | sed -n '/^SBATCH_/p; /^GPUS_PER_NODE=/p') ||
  job_fail "experiments/sites/$SITE.sh" "bash cannot source it, or its last command failed" "correct the file"
export SITE
given=(SITE)
while IFS='=' read -r name value; do
  case $name in
    GPUS_PER_NODE) GPUS_PER_NODE=$value ;;
    ?*)
      export "$name=$value"
      given+=("$name")
      ;;
  esac
done <<<"$settings"
leave_out_large_jobs
if [[ $frozen = yes && $dry_run = no ]]; then
  SNAPSHOT=$(snapshot)
  export SNAPSHOT
fi

# 4. The submission

if [[ $dry_run = yes && $SITE != laptop ]] && command -v sbatch >/dev/null && ! sinfo >/dev/null 2>&1; then
  echo 'warning: sinfo: it fails, so Slurm is not asked whether it accepts the jobs; ask your administrator' >&2
fi
previous="" code=0 number=0
for script in "${scripts[@]}"; do
  cd "$(dirname "$script")"
  name=$(basename "$script")
  line=(sbatch --parsable)
  answer="log/ cannot be created"
  if [[ $chain = yes && -n $previous ]]; then
    # afterany continues the chain after a failed experiment, such as one that is expected to run out of memory
    line+=("--dependency=afterany:$previous")
  fi
  if [[ $dry_run = yes ]]; then
    show_progress "$((++number))" "$script"
    previous="<id of the line above>"
    printf '\ncd %q && ' "$PWD"
    for variable in "${given[@]}"; do
      printf '%s=%q ' "$variable" "${!variable}"
    done
    printf '%s %q\n' "${line[*]}" "$name"
    # Unset Slurm's variables: submit.sh may run inside a job with other numbers of nodes and GPUs
    (unset "${!SLURM_@}" && DRY_RUN=1 bash "$name") || code=$?
    if sinfo >/dev/null 2>&1 && ! ask_slurm "$name"; then
      printf 'error: %s: Slurm would refuse it: %s; correct the site file or the directives\n' "$script" "${answer//$'\n'/ }" >&2
      code=3
    fi
  # Create log/ first: without it, Slurm fails the job without a message
  elif mkdir -p log && ask_slurm "$name" && answer=$("${line[@]}" "$name" 2>&1); then
    previous=$(sed -n '$s/;.*//p; $!d' <<<"$answer;") # the last line is the job id, for example 4711 or 4711;cluster
    printf '%s  %s\n' "$previous" "${script#"$ROOT"/}"
  else
    printf 'error: %s: Slurm refuses it: %s; correct the site file or the directives\n' "${script#"$ROOT"/}" "${answer//$'\n'/ }" >&2
    code=3
  fi
done
exit "$code"
