# make demo | preflight | gpu-check | report | docs | quick | test | test-experiments | test-faults | lint | format
# (Python 3.11 or newer with venv, git and make must be installed; for torch.compile g++, too)
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/installed
	$(BIN)/python scripts/demo.py

# The environment that is active (a cluster's conda), else .venv; more flags:  make preflight FLAGS=--submit
ACTIVE := $(VIRTUAL_ENV)$(filter-out base,$(CONDA_DEFAULT_ENV))
preflight: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/preflight.py $(FLAGS)

# Every way to train on one GPU, and how fast; without one, its CPU profile:  make gpu-check FLAGS=--cpu
gpu-check: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/gpu_check.py $(FLAGS)

# The pages as a web site; nothing in it asks another server
SITE_FOLDER ?= build/site
docs: .venv/installed-dev
	@$(BIN)/sphinx-build --quiet --fail-on-warning -b html -d build/doctrees -c docs/site . $(SITE_FOLDER)
	@echo "open $(SITE_FOLDER)/index.html"

report: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/report.py $(FLAGS)

# Lint and the unit tests, at the same time: a minute
quick: .venv/installed-dev
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

# All tests; a slip fails in the first minute
test: quick full

unit: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 tests/unit
	@# what a plain pytest would meet: all other files, imported but not run
	@collected=$$($(BIN)/python -m pytest --collect-only --quiet tests) || { echo "$$collected"; exit 1; }

# All but the unit tests; tests/conftest.py says which of them go to the same one of the three workers
full: .venv/installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadscope tests/commands tests/integration tests/faults tests/slurm tests/gpu

test-experiments: .venv/installed-dev
	$(BIN)/python -m pytest -m experiments tests/slurm

# Each moment, and each method (fp16 too), of what `test` tries once
test-faults: .venv/installed-dev
	$(BIN)/python -m pytest -m 'faults or not faults' tests/faults tests/slurm/test_requeue.py tests/integration/test_fp16.py

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/text_checks
	git ls-files -z '*.sh' .ci/run | xargs -0 -r $(BIN)/shellcheck
	@# each of these sources job.sh, whose flow was analysed just now
	git ls-files -z '*.slurm' | xargs -0 -r $(BIN)/shellcheck --extended-analysis=false
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shfmt -d -i 2 -ci -ln bash

format: .venv/installed-dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shfmt -w -i 2 -ci -ln bash

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: PYTHON: 3.11 or newer is needed; use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@# read the types of PyTorch and transformers once, for half a minute; what it finds wrong is for lint to tell
	-$(BIN)/mypy > /dev/null
	touch $@

.PHONY: demo preflight gpu-check report docs quick test unit full test-experiments test-faults lint format
