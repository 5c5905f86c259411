# `make` alone lists the targets. Variables, given as `NAME=value make TARGET`:
#   PYTHON       Python 3.11 or 3.12 that the environment is made from (python3)
#   VENV         where the environment goes (.venv)
#   TORCH_INDEX  PyTorch's CPU index, where the CUDA build (several GB) would be fetched otherwise:
#                https://download.pytorch.org/whl/cpu
#   WITHOUT_TE   1: install-gpu leaves TransformerEngine out (no context parallelism, no FP8)
#   MAX_JOBS     compilers at a time while install-gpu builds TransformerEngine (one a core)
#   ARGS         added to the command: ARGS="-k overlong -x" make test; ARGS="-n 0 --pdb" one test after the other
#   SYMBOLIC_VENV  environment with CUDA wheels for `make test-symbolic` (.venv-symbolic, made where it is missing)
#   SYMBOLIC_PAGE  page that `make test-symbolic` writes its tables to (none)
#   DEMO_DIR     run directory of `make demo` (runs/quickstart)
#   RUNS         finished runs whose screenshots `make docs` takes (none); the last one with monitor.timeline_every

VENV ?= .venv
SYMBOLIC_VENV ?= .venv-symbolic
DEMO_DIR ?= runs/quickstart
GPU_LOCK ?= requirements/gpu312.lock.txt
ARGS ?=

BIN := $(VENV)/bin
# Once there is an environment, its own Python looks after it, so that PYTHON need not be named again.
INSTALLER = $(or $(PYTHON),$(shell test -x "$(BIN)/python" && echo "$(BIN)/python" || echo python3))

# With it set, every start of every process compiles its imports anew: three times as slow.
unexport PYTHONDONTWRITEBYTECODE
ifdef TORCH_INDEX
export PIP_EXTRA_INDEX_URL := $(TORCH_INDEX) $(PIP_EXTRA_INDEX_URL)
endif
# Python's buffering would hide progress in a log.
export PYTHONUNBUFFERED = 1
export SYMBOLIC_PAGE

TESTS := $(BIN)/python -m pytest
# Three files of tests at a time, in the order of their names: the long ones stand in the middle.
# On two cores too: many tests wait for processes to start and end.
AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install install-gpu relock demo test test-slow test-slurm test-gpu test-symbolic check format base-model ladder data docs clean clean-venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: ## make .venv from the lock of the Python at hand; does nothing when it is there
	@"$(INSTALLER)" -m tools.install --venv "$(VENV)"

install-gpu: ## make .venv for GPU nodes (Python 3.12, no GPU needed for it); builds TransformerEngine, 25 core minutes
	@"$(INSTALLER)" -m tools.install --gpu $(if $(WITHOUT_TE),--without-te) --venv "$(VENV)"

relock: ## write the lock of GPU nodes anew from pyproject's bounds; keeps the versions that still fit, fetches metadata only
	"$(firstword $(wildcard $(BIN)/uv) uv)" pip compile pyproject.toml requirements/installers.txt --extra gpu --extra dev \
		--python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate --output-file "$(GPU_LOCK)" > /dev/null

demo: install ## train the quickstart with DAPO on two CPU cores (an earlier run is kept aside)
	@if [ -e "$(DEMO_DIR)" ]; then \
		if ! flock -n "$(DEMO_DIR)/.lock" true; then echo "a live run holds $(DEMO_DIR); wait for it"; exit 1; fi; \
		aside="$(DEMO_DIR).$$(date +%Y%m%d-%H%M%S)"; \
		mv "$(DEMO_DIR)" "$$aside" && echo "the earlier run is kept in $$aside"; \
	fi
	$(BIN)/megatron-dapo train examples/quickstart/dapo.yaml run.dir=$(DEMO_DIR) $(ARGS)

test: install ## run the default tests (CPU)
	OMP_NUM_THREADS=1 $(TESTS) $(AT_ONCE) --durations=10 $(ARGS)

test-slow: install ## run the tests that take minutes each
	OMP_NUM_THREADS=1 $(TESTS) -m "slow and not gpu and not slurm and not symbolic" --durations=10 $(ARGS)

test-slurm: install ## run a job on a Slurm of two virtual nodes; installs Debian's Slurm (needs root)
	OMP_NUM_THREADS=1 $(TESTS) tests/slurm -m slurm -rs $(ARGS)

test-gpu: install ## check and measure on the GPUs of this machine, 25 minutes; results in runs/gpu
	$(BIN)/python -m tests.gpu.runner.run_stages $(ARGS)

test-symbolic: ## trace the recipes' ranks at true size: CUDA wheels (4 GB), gcc, no GPU
	@test -x "$(SYMBOLIC_VENV)/bin/pytest" || { \
		$(or $(PYTHON),python3.12) -m venv "$(SYMBOLIC_VENV)" && \
		grep -Ev '^transformer[-_]engine[-_]torch' requirements/gpu312.lock.txt > "$(SYMBOLIC_VENV)/lock.txt" && \
		"$(SYMBOLIC_VENV)/bin/pip" install --no-deps -r "$(SYMBOLIC_VENV)/lock.txt"; }
	OMP_NUM_THREADS=1 "$(SYMBOLIC_VENV)/bin/python" -m pytest tests/symbolic -m symbolic --durations=10 $(ARGS)

check: install ## lint, format, types, import direction, example configs, documents; under a minute
	@failed=; \
	for command in "$(BIN)/ruff check ." "$(BIN)/ruff format --check ." "$(BIN)/mypy" "$(TESTS) -q tests/test_repository.py tests/docs/test_links.py tests/docs/test_references.py"; do \
		echo "$$command"; $$command || failed="$$failed\n  $$command"; \
	done; \
	if [ -n "$$failed" ]; then printf "make check: failed:$$failed\n"; exit 1; fi

format: install ## format the code and apply the linter's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

base-model: install ## train the quickstart's base model anew
	$(BIN)/python examples/quickstart/make_base.py $(ARGS)

ladder: install ## switch each technique on and off over five seeds; hours, and resumable (examples/ablation)
	$(BIN)/python -m examples.ablation $(ARGS)

data: install ## write the quickstart's prompt files anew
	$(BIN)/python examples/quickstart/make_data.py

docs: install ## write the generated pages anew; RUNS="runs/a runs/b": the screenshots too, of those runs (Chromium)
	$(BIN)/python -m tools.docs_pages $(if $(RUNS),--pictures $(RUNS))

clean: ## remove caches and build products (runs stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv: ## remove the environment
	@[ ! -e "$(VENV)" ] || [ -e "$(VENV)/install.lock" ] || { echo "$(VENV) was not made by make install"; exit 1; }
	rm -rf "$(VENV)"
