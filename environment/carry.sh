#!/usr/bin/env bash
# Fill a folder with what a centre without internet needs: the wheels, a bundle with this clone, and a Hugging Face
# cache with models and a data set. SHA256SUMS lists the files. `make carry` starts:
#     environment/carry.sh build/carry
#     MODELS="bigscience/bloom-560m bigscience/bloom-3b" environment/carry.sh build/carry
# The Python, its version and the build of torch are those of PYTHON and of pip. A part that exists is not made again.
set -euo pipefail

repository=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${PYTHON:=$repository/.venv/bin/python}" "${MODELS:=bigscience/bloom-560m}" "${DATASET:=squad}"
mkdir -p "$1"
cd "$1"

if [[ ! -d wheels ]]; then # some packages have no wheel on PyPI, and a build would need the network
  "$PYTHON" -m pip wheel --wheel-dir wheels.part -r "$repository/requirements.txt"
  mv wheels.part wheels
fi
if [[ ! -d huggingface ]]; then
  for model in $MODELS; do
    HF_HOME=$PWD/huggingface.part "$PYTHON" "$repository/scripts/prefetch.py" --model_name "$model" --dataset "$DATASET"
  done
  mkdir -p huggingface.part
  mv huggingface.part huggingface
fi
git -C "$repository" bundle create --quiet "$PWD/workshop.bundle" HEAD --branches --tags
find wheels huggingface workshop.bundle -type f -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS
du -sh "$PWD"
