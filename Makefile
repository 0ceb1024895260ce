# Everything runs in .venv, which the first target that needs it creates.
#   PYTHON  the interpreter to start from (3.11 or newer)
#   ARGS    passed on: make test ARGS="-k gather -x", make demo ARGS="--device cpu"
PYTHON ?= python3
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.stamp
LINT_STAMP := $(VENV)/.lint-stamp

.DEFAULT_GOAL := help
.PHONY: help demo test gpu gpu2 gpu-soak lint docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)  ## gather from real data on your device, check every byte, show times
	$(VENV)/bin/multigather demo $(ARGS)

# Also to be run with ARGS="--default-device meta", see CONTRIBUTING.md.
# Workers that have nothing left take tests of the others: one file's tests take minutes. Idle threads
# of torch sleep: several workers' threads would otherwise wait for work on one another's cores.
test: $(STAMP)  ## run the tests, on up to eight cores
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest tests -n auto --maxprocesses 8 --dist worksteal $(ARGS)

gpu:  ## GPU tests, then the benchmark, with the Python at hand: no venv, no network
	$(PYTHON) tools/gpu_check.py $(ARGS)

gpu2:  ## tests and benchmark of multigather.distributed on two GPUs, with the Python at hand
	$(PYTHON) tools/gpu2_check.py $(ARGS)

gpu-soak:  ## the long form of the GPU's reliability tests: service, fuzzing, sanitizers
	$(PYTHON) tools/gpu_soak.py $(ARGS)

lint: $(LINT_STAMP)  ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(STAMP)  ## build the documentation into site/
	$(VENV)/bin/mkdocs build --strict $(ARGS)

clean:  ## remove .venv, build output and caches
	rm -rf $(VENV) build dist site *.egg-info multigather/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py multigather/_native.c constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV) --extras test,demo,docs
	@touch $@

$(LINT_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]' --constraint $(VENV)/constraints.txt
	@touch $@
