#!/usr/bin/env bash
# Find the site and load its variables. job.sh and submit.sh source this file. preflight.py and watch.sh
# start it with a command, which then runs in the environment of a job, outside CONTAINER:
#     SITE=laptop bash experiments/load_site.sh python -c 'import sys; print(sys.prefix)'
# The site is $SITE, or else the name in experiments/site. The site's file, experiments/sites/NAME.sh, sets knobs and
# defines site_setup, which puts the site's python first on PATH.

job_fail() { # WHAT PROBLEM WAY_OUT [EXIT_CODE]
  printf 'error: %s: %s; %s\n' "$1" "$2" "$3" >&2
  exit "${4:-2}"
}

job_find_site() { # set SITE and SITE_FILE
  local -r remedy="choose one of experiments/sites (laptop needs no GPU): set SITE=name, or write it into experiments/site"
  if [[ -z ${SITE:-} && -f $EXPERIMENTS_FOLDER/site ]]; then
    SITE=$(<"$EXPERIMENTS_FOLDER/site")
    SITE=${SITE%$'\r'} # an editor on Windows may have written the file
  fi
  if [[ -z ${SITE:-} ]]; then
    job_fail SITE "no site is chosen" "$remedy"
  fi
  SITE_FILE=$EXPERIMENTS_FOLDER/sites/$SITE.sh
  if [[ $SITE = */* || ! -f $SITE_FILE ]]; then
    job_fail SITE "there is no experiments/sites/$SITE.sh" "$remedy"
  fi
  job_check_secrets
  job_check_site
}

job_check_secrets() { # only the owner may read a site file that sets WANDB_API_KEY, HF_TOKEN or another secret
  local -r name='(TOKEN|KEY|SECRET|PASSW(OR)?D|(\b|_)PASS|CREDENTIALS?)(_[A-Z0-9_]+)?:?='
  local -r url='://[^/[:space:]]*:[^/$[:space:]]+@' # http://user:password@proxy
  if grep -qiE "^[^#]*($name|$url)" "$SITE_FILE" && [[ -n $(find -L "$SITE_FILE" \( -perm -g=r -o -perm -o=r \)) ]]; then
    job_fail "experiments/sites/$SITE.sh" "it sets a secret, but other users may read it" "run chmod 600 on it" 3
  fi
}

job_check_site() {
  if grep -q $'\r$' "$SITE_FILE"; then
    job_fail "experiments/sites/$SITE.sh" "it has Windows line ends" "remove them: sed -i 's/\r\$//' $SITE_FILE"
  fi
  if grep -q '^[^#]*CHANGE_ME' "$SITE_FILE"; then
    job_fail "experiments/sites/$SITE.sh" "it still holds CHANGE_ME" "fill in these values"
  fi
}

job_check_python() { # without this, an older Python fails to parse run_job.py
  local -r needed='import importlib.util, shutil, sys
needed = {"Python 3.11 or newer": sys.version_info >= (3, 11), "pydantic": importlib.util.find_spec("pydantic")}
needed["psrecord"] = shutil.which("psrecord") or not sys.argv[1]
print(", ".join(name for name in needed if not needed[name]))'
  local lacks
  lacks=$("$JOB_PYTHON" -c "$needed" "${CONTAINER:-}" 2>/dev/null) || lacks="Python 3.11 or newer"
  if [[ -n $lacks ]]; then
    job_fail "requirements${CONTAINER:+-host}.txt" "$JOB_PYTHON does not have: $lacks" "install this file with Python 3.11 or newer, and activate that environment in site_setup of experiments/sites/$SITE.sh" 3
  fi
}

job_load_site() { # load the site's variables and choose JOB_PYTHON; call this under set -a to export them
  # shellcheck source=experiments/sites/laptop.sh
  source "$SITE_FILE"
  # module and conda define functions, which set -a would export, and read unset variables, which set -u forbids
  set +au
  site_setup
  set -au
  JOB_PYTHON=$(command -v python || { [[ -n ${CONTAINER:-} ]] && command -v python3; }) ||
    job_fail "experiments/sites/$SITE.sh" "there is no python after site_setup" "activate the environment there" 3
  job_check_python
}

if [[ ${BASH_SOURCE[0]} = "$0" ]]; then
  set -aeuo pipefail
  EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  ROOT=$(dirname "$EXPERIMENTS_FOLDER")
  job_find_site
  echo "site: $SITE" >&2
  job_load_site >&2
  [[ $1 != python ]] || set -- "$JOB_PYTHON" "${@:2}"
  exec "$@"
fi
