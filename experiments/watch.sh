#!/usr/bin/env bash
# Watch a job, or a run without Slurm, in the terminal:  experiments/watch.sh 4711   (--help shows more)
set -euo pipefail
experiments=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
watch=(python "$experiments/../scripts/watch.py" "$@")
# A shell without the workshop's environment gets the site's, as a job does
if ! python -c 'import pydantic' 2>/dev/null; then
  watch=(bash "$experiments/load_site.sh" "${watch[@]}")
fi
exec "${watch[@]}"
