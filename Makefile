# Everything a newcomer types. Each target makes what it needs first: a virtual environment in .venv, with the package
# installed from this folder and every direct dependency at the version in constraints.txt.
#
#   make demo    run notebooks/quickstart.ipynb on a local mesh of four ranks, and say where the result is
#   make test    whether README's promises hold, within 15 minutes on two cores (tests/suites.py); what failed is run
#                again, alone, and listed as flaky if it passes then (make test PEERS=1 installs Monarch and Ray, and make
#                .venv/installed-models transformers, whose tests then run; WORKERS=0 runs one test after the other, for one
#                who looks for the cause of a failure)
#   make test-all   every test that this machine can run, each folder in a process of its own: an hour on two cores
#   make soak    random programs, faults and hangs, for as long as one likes: make soak MINUTES=60
#   make test-fast  the tests that start no process and those of one mesh, for every change: at most 4 minutes
#   make test-pure  those that start no process, without torch, on any Python: make test-pure PYTHON=python3.13
#   make test-cluster  those on several machines, which are made of namespaces: as root, with sshd and iproute2; with
#                     slurm-wlm and munge those in a Slurm cluster too, with Ray (PEERS=1) those on a Ray
#   make test-gpu  those that need NVIDIA GPUs, one or several; what passed where is written to build/gpu.md
#   make lab     open the quickstart in JupyterLab; as root, as in a container: make lab LAB_ARGS=--allow-root
#   make bench   measure, and compare with what others do (make bench PEERS=1 installs the others too)
#   make docs    build the docs site into build/site; a broken link or name is an error
#   make check   ruff and mypy --strict

PYTHON ?= python3
VENV ?= .venv
# Processes that `make test` runs tests in, a file of them in one; 0: one after the other, which takes half as long again.
WORKERS ?= 2
# How long `make soak` takes.
MINUTES ?= 60
BIN := $(VENV)/bin
QUICKSTART := notebooks/quickstart.ipynb

# What an installation depends on. The kernelspec is copied into the environment, so a change to it installs again.
SOURCES := pyproject.toml constraints.txt $(wildcard kernelspec/*)

# Never without the constraints: unpinned, pip may replace torch by a build of some gigabytes.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all soak test-fast test-pure test-cluster test-gpu lab bench docs check clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
		|| { echo "Meshbook needs Python 3.11 to 3.14; name one with: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: installed if this file is newer than everything it was made from.
$(VENV)/installed-%: $(SOURCES) | $(BIN)/python
	@echo 'Installing Meshbook[$*] into $(VENV): minutes, where PyTorch has to be fetched.'
	$(INSTALL) -e '.[$*]'
	@touch $@

# Writes build/quickstart.ipynb and build/quickstart.html, and says so.
demo: $(VENV)/installed-demo
	$(BIN)/python -m meshbook.cli.main run $(QUICKSTART)

test: $(VENV)/installed-dev $(if $(PEERS),$(VENV)/installed-peers)
	$(BIN)/python -m tests.second_pass --gate --numprocesses=$(WORKERS) --dist=loadfile $(PYTEST_ARGS)

test-all: $(VENV)/installed-dev $(if $(PEERS),$(VENV)/installed-peers)
	$(BIN)/python -m tests.by_folder --numprocesses=$(WORKERS) --dist=loadfile $(PYTEST_ARGS)

soak: $(VENV)/installed-dev
	$(BIN)/python -m tests.soak --minutes=$(MINUTES) $(SOAK_ARGS)

# What the tests that start no process need; those of them that need more are skipped, with the reason.
PURE_NEEDS := pyzmq msgspec cloudpickle cryptography psutil numpy ipython nvidia-ml-py pytest pytest-timeout pytest-xdist hypothesis
PURE_VENV = .venv-pure/$(notdir $(PYTHON))

test-fast: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile -m pure tests $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/controller/test_run.py $(PYTEST_ARGS)

test-cluster: $(VENV)/installed-dev $(if $(PEERS),$(VENV)/installed-peers)
	$(BIN)/python -m pytest -m cluster tests/cluster tests/engines $(PYTEST_ARGS)

test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu tests $(PYTEST_ARGS)

test-pure:
	test -x $(PURE_VENV)/bin/python || $(PYTHON) -m venv $(PURE_VENV)
	$(PURE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PURE_NEEDS)
	$(PURE_VENV)/bin/python -m pytest -q -rfE --numprocesses=$(WORKERS) --dist=loadfile -m pure tests $(PYTEST_ARGS)

lab: $(VENV)/installed-lab
	$(BIN)/python -m jupyter lab $(QUICKSTART) $(LAB_ARGS)

bench: $(VENV)/installed-dev $(if $(PEERS),$(VENV)/installed-peers)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The docs site is in build/site. To read it with its search: python3 -m http.server -d build/site -b 127.0.0.1"

check: $(VENV)/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) .venv-pure build dist
