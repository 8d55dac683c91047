#!/usr/bin/env bash
# Submit one experiment, a family of them, or all:
#     experiments/submit.sh baseline
#     experiments/submit.sh --chain deepspeed-multi-gpu              # one after another
#     experiments/submit.sh --dry-run all                            # only show the sbatch lines
#     experiments/submit.sh --snapshot deepspeed-single-gpu/zero_2   # later edits do not reach the queued job
# FAMILY or FOLDER is a path below experiments/. Every experiment is checked first; if one is wrong, none is submitted.
# A warning tells what will not fit into the GPU or --mem; it is submitted all the same. What Slurm refuses (more GPUs
# than a node has) is left out and named, and the exit code is then 3; the dry run asks Slurm, too, and warns.
# Knobs come from the environment:  MODEL_NAME=bigscience/bloom-3b experiments/submit.sh deepspeed-single-gpu
set -euo pipefail

EXPERIMENTS_FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh"

# Functions; they read the variables of the numbered parts below
snapshot() { # freeze what a job reads; prints the folder
  local -r folder=$ROOT/snapshots/$(date +%Y%m%d-%H%M%S)-$$
  mkdir -p "$folder"
  local -r without=(--exclude={__pycache__,results,output,cpu_memory,gpu_memory,log,profile})
  tar -C "$ROOT" -cf - "${without[@]}" scripts ds_configs fsdp_configs data experiments | tar -C "$folder" -xf - ||
    job_fail "$folder" "the snapshot is not complete" "see the message above"
  local commit dirty=false
  if commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null); then
    commit="\"$commit\""
  else
    commit=null
  fi
  if [[ -n $(git -C "$ROOT" status --porcelain -- . ':(exclude)experiments/sites' 2>/dev/null) ]]; then
    dirty=true
  fi
  printf '{"commit": %s, "dirty": %s}\n' "$commit" "$dirty" >"$folder/git.json"
  if [[ -d $ROOT/.venv ]]; then
    ln -s "$ROOT/.venv" "$folder/.venv" # sites look for it in $ROOT
  fi
  printf '%s' "$folder"
}

sbatch_settings() { # NAME=value of each SBATCH_ variable that the site, or the caller, sets
  # shellcheck source=experiments/sites/laptop.sh
  (source "$SITE_FILE" && { env | grep '^SBATCH_' || true; }) ||
    job_fail "experiments/sites/$SITE.sh" "bash cannot source it, or its last command failed" "correct it"
}

check_scripts() { # of the site whose knobs decide what fits
  (
    set -a
    # shellcheck source=experiments/sites/laptop.sh
    source "$SITE_FILE"
    memory=()
    if [[ ${REQUIRE_GPU:-1} != 0 ]]; then
      memory=(--memory)
    fi
    exec "$python" "$ROOT/scripts/check_experiment.py" "${memory[@]}" "${scripts[@]}"
  )
}

given_knobs() { # names of the knobs that were given with this command
  local variable rest
  "$python" "$ROOT/scripts/knobs.py" | while read -r variable rest; do
    if [[ -n ${!variable:-} ]]; then
      printf '%s\n' "$variable"
    fi
  done
}

show_line() { # FOLDER SCRIPT: what would be submitted, for a shell to read
  local variable value
  printf 'cd %q && ' "$1"
  while IFS='=' read -r variable value; do
    printf '%s=%q ' "$variable" "$value"
  done < <(sort "$settings")
  for variable in $knobs; do
    printf '%s=%q ' "$variable" "${!variable}"
  done
  printf 'SITE=%q %s%s %q\n' "$SITE" "${SNAPSHOT:+SNAPSHOT=${SNAPSHOT@Q} }" "${line[*]}" "$2"
}

reason() { # sbatch's error lines as one
  sed 's/^sbatch: error: //' "$said" | paste -sd ' '
}

# 1. The command line

chain=no
dry_run=no
frozen=no
target=""
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
      if [[ -n $target ]]; then
        job_fail "$argument" "one target at a time" "see --help"
      fi
      target=$argument
      ;;
  esac
done
if [[ -z $target ]]; then
  job_fail "submit.sh" "nothing to submit" "give a family, a folder or all; see --help"
fi

# 2. The experiments

case $target in
  all) folder=$EXPERIMENTS_FOLDER ;;
  . | .. | ./* | ../*) folder=$target ;; # from where the user stands
  *)
    folder=$target
    if [[ -d $EXPERIMENTS_FOLDER/$target ]]; then
      folder=$EXPERIMENTS_FOLDER/$target
    fi
    ;;
esac
folder=$(cd "$folder" 2>/dev/null && pwd) || job_fail "$target" "there is no such folder below experiments/" "see ls experiments"
mapfile -d '' scripts < <(find "$folder" -name '*.slurm' -print0 | sort -zV)
if [[ ${#scripts[@]} -eq 0 ]]; then
  job_fail "$target" "it holds no .slurm file" "see ls experiments"
fi

# 3. The site, and the checks

settings=$(mktemp)
said=$(mktemp)
trap 'rm -f "$settings" "$said"' EXIT
job_find_site
job_check_site
sbatch_settings >"$settings"
python=python
if [[ -x $ROOT/.venv/bin/python ]]; then
  python=$ROOT/.venv/bin/python
fi
check_scripts || exit 2

# 4. The submission

while IFS='=' read -r name value; do
  export "$name=$value"
done <"$settings"
export SITE
if [[ $frozen = yes ]]; then
  SNAPSHOT="$ROOT/snapshots/<time>"
  if [[ $dry_run = no ]]; then
    SNAPSHOT=$(snapshot)
  fi
  export SNAPSHOT
fi
knobs=""
if [[ $dry_run = yes ]]; then
  knobs=$(given_knobs)
fi
previous=""
refused=0
for script in "${scripts[@]}"; do
  name=$(basename "$script")
  line=(sbatch --parsable)
  if [[ $chain = yes && -n $previous ]]; then
    # afterany: the chain goes on behind an experiment that failed, or that ran out of memory as it should
    line+=("--dependency=afterany:$previous")
  fi
  cd "$(dirname "$script")"
  if [[ $dry_run = yes ]]; then
    show_line "$PWD" "$name"
    previous="<id of the line above>"
    if command -v sbatch >/dev/null && ! sbatch --test-only "$name" >"$said" 2>&1; then
      printf 'warning: %s: Slurm would refuse it: %s\n' "${PWD#"$ROOT"/}/$name" "$(reason)" >&2
    fi
  elif id=$("${line[@]}" "$name" 2>"$said"); then
    cat "$said" >&2
    previous=${id%%;*} # 4711;cluster
    printf '%s  %s\n' "$previous" "${PWD#"$ROOT"/}/$name"
  else
    printf 'error: %s: Slurm refuses it: %s; correct the site file or the directives\n' "${PWD#"$ROOT"/}/$name" "$(reason)" >&2
    refused=$((refused + 1))
  fi
done
if [[ $refused -gt 0 ]]; then
  exit 3
fi
