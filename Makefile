# make demo | preflight | gpu-check | report | test | test-experiments | lint     (Python 3.11 or newer with venv, git, make and g++ must be installed)
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

# The environment that is active (a cluster's conda), else .venv; more flags:  make preflight FLAGS=--submit
ACTIVE := $(VIRTUAL_ENV)$(filter-out base,$(CONDA_DEFAULT_ENV))
preflight: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/preflight.py $(FLAGS)

# Every way to train on one GPU, and how fast; without one, its CPU profile:  make gpu-check FLAGS=--cpu
gpu-check: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/gpu_check.py $(FLAGS)

report: .venv/installed
	$(BIN)/python scripts/report.py

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 tests/unit
	$(BIN)/python -m pytest tests/integration tests/slurm tests/gpu

test-experiments: .venv/installed-dev
	$(BIN)/python -m pytest -m experiments tests/slurm

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shellcheck
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shfmt -d -i 2 -ci -ln bash

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: PYTHON: 3.11 or newer is needed; use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@

.PHONY: demo preflight gpu-check report test test-experiments lint
