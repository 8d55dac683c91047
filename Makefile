# make demo | cluster | cluster-down | preflight | gpu-check | report | docs | pages | figures | constraints | carry | quick | test | test-experiments | test-faults | test-image | test-real | lint | format
# (You need Python 3.11 or newer with venv, git and make; for torch.compile also g++)
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/installed
	$(BIN)/python scripts/demo.py

# Use the active environment, such as a cluster's conda, or else .venv. Flags:  make preflight FLAGS=--submit
ACTIVE := $(VIRTUAL_ENV)$(filter-out base,$(CONDA_DEFAULT_ENV))
preflight: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/preflight.py $(FLAGS)

# A Slurm of two nodes on this machine, and a shell in it. With sudo, root must not install the packages into .venv
cluster: $(if $(ACTIVE)$(SUDO_USER),,.venv/installed)
	@PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" && python scripts/cluster.py start $(FLAGS) && { python scripts/cluster.py shell || true; }

cluster-down:
	@PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/cluster.py stop

# Check every way to train on one GPU. Without a GPU:  make gpu-check FLAGS=--cpu
gpu-check: $(if $(ACTIVE),,.venv/installed)
	PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/gpu_check.py $(FLAGS)

# Build the pages as a web site, which loads nothing from other servers
SITE_FOLDER ?= build/site
docs: .venv/installed-docs
	@$(BIN)/sphinx-build --quiet --fail-on-warning -b html -d build/doctrees -c docs/site . $(SITE_FOLDER)
	@echo "open $(SITE_FOLDER)/index.html"

# Write the blocks of the pages, and of experiments/afternoon.sh, that other files already contain (docs/generated.py)
GENERATED = git grep -lz '^\(<!--\|\#\) \[\[\[cog' -- '*.md' '*.sh' | CUDA_VISIBLE_DEVICES= PYTHONPATH=scripts:docs xargs -0 -r $(BIN)/python -m cogapp -P
pages: .venv/installed-dev
	@$(GENERATED) -r --verbosity=1

# Fail if a block is not what `make pages` would write
pages-check: .venv/installed-dev
	@$(GENERATED) --check --diff --verbosity=1 --check-fail-msg='a page differs from docs/generated.py; run make pages'

# Draw the figures of the pages, and make the pictures of the report with a browser (Chromium)
figures: .venv/installed-dev
	$(BIN)/python docs/figures/draw.py
	$(BIN)/python docs/figures/pictures.py

report: $(if $(ACTIVE),,.venv/installed)
	@PATH="$(if $(ACTIVE),,$(CURDIR)/$(BIN):)$$PATH" python scripts/report.py $(FLAGS)

# After a change of a requirements file: find one version of every package, for each Python from 3.11. A pin changes only
# if it has to; FLAGS=--upgrade takes new releases. The packages cuda-* are absent: each build of torch needs its own.
constraints: | $(BIN)/pip
	@$(BIN)/python -m pip install --quiet uv==0.13.9
	@grep -h '^\w' requirements.txt requirements-docs.txt requirements-dev.txt | $(BIN)/uv pip compile --quiet $(FLAGS) \
	  --universal --python-version 3.11 --fork-strategy fewest --no-annotate --custom-compile-command 'make constraints' \
	  $(addprefix --no-emit-package cuda-,bindings pathfinder toolkit) --output-file constraints.txt -

# All that a centre without internet needs, in build/carry. Variables and the way there: environment/carry.sh
carry: .venv/installed
	environment/carry.sh build/carry

# Lint and unit tests in parallel (CONTRIBUTING.md has the times)
quick: .venv/installed-dev
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

# All tests; small mistakes fail first
test: quick full

unit: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 tests/unit
	@# collect all tests as a plain pytest would, so that import errors fail here
	@collected=$$($(BIN)/python -m pytest --collect-only --quiet tests) || { echo "$$collected"; exit 1; }

# All tests except the unit tests; tests/conftest.py groups the tests that must run on the same worker
full: .venv/installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder tests/commands tests/integration tests/faults tests/slurm tests/gpu

test-experiments: .venv/installed-dev
	$(BIN)/python -m pytest -m experiments tests/slurm

# Slow tests, and further cases of those that `test` tries once: moments of a fault, methods, fp16, LoRA, estimates
test-faults: .venv/installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadscope -m faults tests

# An image with the packages, and the folder of `make carry`, train as an ordinary user; for root on Debian, with network
test-image: .venv/installed-dev
	tests/image.sh

# A real pretrained model learns real questions; skipped without its files (data/README.md)
test-real: .venv/installed-dev
	$(BIN)/python -m pytest -rs tests/real

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/text_checks
	$(MAKE) --no-print-directory pages-check
	git ls-files -z '*.sh' .ci/run | xargs -0 -r $(BIN)/shellcheck
	@# each of these sources job.sh, whose control flow the line above has already analysed
	git ls-files -z '*.slurm' | xargs -0 -r $(BIN)/shellcheck --extended-analysis=false
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shfmt -d -i 2 -ci -ln bash

format: .venv/installed-dev
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	git ls-files -z '*.sh' '*.slurm' .ci/run | xargs -0 -r $(BIN)/shfmt -w -i 2 -ci -ln bash

ANNOUNCEMENT := pip installs PyTorch with CUDA, transformers, DeepSpeed and other packages into .venv, once: \
  about 2.9 GB to download and 5.7 GB on disk

# After `|`, make asks only whether pip is there. Its date does not matter, so an old environment is not installed again.
.venv/installed: requirements.txt constraints.txt | $(BIN)/pip
	@test -e $@ || echo "$(ANNOUNCEMENT)"
	@# pip shows its progress the first time; later it would only list the packages that are already there
	$(BIN)/python -m pip install $(if $(wildcard $@),--quiet) -r requirements.txt
	touch $@

# Few packages, so that `make docs` neither waits for PyTorch nor needs it
.venv/installed-docs: requirements-docs.txt constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-docs.txt requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@# fill mypy's cache with the types of PyTorch and transformers, in half a minute; lint reports the errors
	-$(BIN)/mypy > /dev/null
	touch $@

# pip is what venv installs last, so it is missing after a failed attempt
$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: PYTHON: 3.11 or newer is needed; use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.PHONY: demo cluster cluster-down preflight gpu-check report docs pages pages-check figures constraints carry quick test unit full test-experiments test-faults test-image test-real lint format
