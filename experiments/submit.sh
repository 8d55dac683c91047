#!/usr/bin/env bash
# Submit one experiment, a family of them, or all:
#     experiments/submit.sh baseline
#     experiments/submit.sh --chain deepspeed-multi-gpu              # one after another
#     experiments/submit.sh --dry-run all                            # only show the sbatch lines
#     experiments/submit.sh --snapshot deepspeed-single-gpu/zero_2   # later edits do not reach the queued job
# FAMILY or FOLDER is a path below experiments/. Every experiment is checked first; if one is wrong, none is submitted.
# A warning tells what will not fit into the GPU or --mem; it is submitted all the same.
# Knobs come from the environment:  MODEL_NAME=bigscience/bloom-3b experiments/submit.sh deepspeed-single-gpu
set -euo pipefail

EXPERIMENTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$EXPERIMENTS")

fail() { # WHAT PROBLEM WAY_OUT
  printf 'error: %s: %s; %s\n' "$1" "$2" "$3" >&2
  exit 2
}

load_site() {
  local name=${SITE:-}
  [[ -n $name || ! -f $EXPERIMENTS/site ]] || name=$(<"$EXPERIMENTS/site")
  [[ -n $name ]] || fail SITE "no site is chosen" "give SITE=name, or write the name into experiments/site"
  [[ $name != */* && -f $EXPERIMENTS/sites/$name.sh ]] || fail SITE "there is no experiments/sites/$name.sh" "see experiments/sites"
  if grep -q '^[^#]*CHANGE_ME' "$EXPERIMENTS/sites/$name.sh"; then
    fail "experiments/sites/$name.sh" "it still holds CHANGE_ME" "fill these values in"
  fi
  # shellcheck source=experiments/sites/laptop.sh
  (source "$EXPERIMENTS/sites/$name.sh" && { env | grep '^SBATCH_' || true; }) >"$settings" ||
    fail "experiments/sites/$name.sh" "bash cannot source it, or its last command failed" "correct it"
  SITE=$name
}

snapshot() { # freeze what a job reads; prints the folder
  local -r folder=$ROOT/snapshots/$(date +%Y%m%d-%H%M%S)-$$
  mkdir -p "$folder"
  local -r without=(--exclude={__pycache__,results,output,cpu_memory,gpu_memory,log})
  tar -C "$ROOT" -cf - "${without[@]}" scripts ds_configs fsdp_configs data experiments | tar -C "$folder" -xf - ||
    fail "$folder" "the snapshot is not complete" "see the message above"
  local commit dirty=false
  commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null) && commit="\"$commit\"" || commit=null
  [[ -z $(git -C "$ROOT" status --porcelain -- . ':(exclude)experiments/sites' 2>/dev/null) ]] || dirty=true
  printf '{"commit": %s, "dirty": %s}\n' "$commit" "$dirty" >"$folder/git.json"
  [[ ! -d $ROOT/.venv ]] || ln -s "$ROOT/.venv" "$folder/.venv" # sites look for it in $ROOT
  printf '%s' "$folder"
}

chain=no dry_run=no frozen="" target=""
for argument in "$@"; do
  case $argument in
    --chain) chain=yes ;;
    --dry-run) dry_run=yes ;;
    --snapshot) frozen=yes ;;
    --help | -h) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "$0" && exit ;;
    -*) fail "$argument" "unknown option" "see --help" ;;
    *) [[ -z $target ]] || fail "$argument" "one target at a time" "see --help" && target=$argument ;;
  esac
done
[[ -n $target ]] || fail "submit.sh" "nothing to submit" "give a family, a folder or all; see --help"

case $target in
  all) folder=$EXPERIMENTS ;;
  . | .. | ./* | ../*) folder=$target ;; # from where the user stands
  *) if [[ -d $EXPERIMENTS/$target ]]; then folder=$EXPERIMENTS/$target; else folder=$target; fi ;;
esac
folder=$(cd "$folder" 2>/dev/null && pwd) || fail "$target" "there is no such folder below experiments/" "see ls experiments"
mapfile -d '' scripts < <(find "$folder" -name '*.slurm' -print0 | sort -zV)
((${#scripts[@]})) || fail "$target" "it holds no .slurm file" "see ls experiments"

settings=$(mktemp)
trap 'rm -f "$settings"' EXIT
load_site
PYTHON=python
[[ ! -x $ROOT/.venv/bin/python ]] || PYTHON=$ROOT/.venv/bin/python
(
  set -a # the site's knobs decide what fits
  # shellcheck source=experiments/sites/laptop.sh
  source "$EXPERIMENTS/sites/$SITE.sh"
  memory=()
  [[ ${REQUIRE_GPU:-1} = 0 ]] || memory=(--memory)
  exec "$PYTHON" "$ROOT/scripts/check_experiment.py" "${memory[@]}" "${scripts[@]}"
) || exit 2

while IFS='=' read -r name value; do export "$name=$value"; done <"$settings"
export SITE
if [[ -n $frozen ]]; then
  SNAPSHOT="$ROOT/snapshots/<time>"
  [[ $dry_run = yes ]] || SNAPSHOT=$(snapshot)
  export SNAPSHOT
fi
knobs="" # that were given with this command
while read -r variable; do [[ -z ${!variable:-} ]] || knobs+=" $variable"; done \
  < <(sed -n 's/^    ("\([A-Z_0-9]*\)", "[a-z_0-9]*", .*/\1/p' "$ROOT/scripts/config.py")
previous=""
for script in "${scripts[@]}"; do
  line=(sbatch --parsable) name=$(basename "$script")
  # afterany: the chain goes on behind an experiment that failed, or that ran out of memory as it should
  [[ $chain = no || -z $previous ]] || line+=("--dependency=afterany:$previous")
  cd "$(dirname "$script")"
  if [[ $dry_run = yes ]]; then
    printf 'cd %q && ' "$PWD"
    while IFS='=' read -r variable value; do printf '%s=%q ' "$variable" "$value"; done < <(sort "$settings")
    for variable in $knobs; do printf '%s=%q ' "$variable" "${!variable}"; done
    printf 'SITE=%q %s%s %q\n' "$SITE" "${SNAPSHOT:+SNAPSHOT=${SNAPSHOT@Q} }" "${line[*]}" "$name"
    previous="<id of the line above>"
  else
    previous=$("${line[@]}" "$name")
    previous=${previous%%;*} # 4711;cluster
    printf '%s  %s\n' "$previous" "${PWD#"$ROOT"/}/$name"
  fi
done
