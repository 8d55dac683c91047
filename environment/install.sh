#!/usr/bin/env bash
# Install the workshop's packages into a new environment, on a machine or in an image:
#     environment/install.sh FOLDER [FLAGS OF PIP]
#     environment/install.sh .venv --extra-index-url https://download.pytorch.org/whl/cu126   # or cpu, without CUDA
#     environment/install.sh .venv --no-index --find-links wheels   # without internet, in the folder of make carry
# PYTHON=python3.12 chooses another Python. docs/environment.md says which build of torch fits a GPU.
set -euo pipefail

repository=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/python" -m pip install "${@:2}" -r "$repository/requirements.txt"
touch "$1/installed" # the site laptop and make look for this file in .venv
