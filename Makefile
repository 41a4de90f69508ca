# Two commands do everything on a fresh machine: make lab, make test. Who changes a line asks make check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Parameters for `make notebooks`, for example: make notebooks PARAMETERS="-p seed 1"
PARAMETERS ?=
# Tests wait about as much as they compute, and most start ranks of their own: a process a core, but not so many that
# ranks fill the memory. 0: one test after the other, in this process.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(2, min(4, os.cpu_count() or 1)))')
# Jupyter asks for this where the user is root, as in a container.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help setup lab test check notebooks lint format constraints benchmarks scoreboard clean

help:
	@echo "make lab         set up if needed, open JupyterLab on the first notebook"
	@echo "make test        set up if needed, run all tests"
	@echo "make check       lint, and the tests that answer in two minutes: no processes but one launch and one lesson"
	@echo "make notebooks   run every notebook headless; executed notebooks and HTML pages in build/notebooks"
	@echo "make lint        ruff, mypy, and what may import what"
	@echo "make benchmarks  measure the figures that README quotes"
	@echo "make scoreboard  measure labkit against other launchers; writes README's table (about 45 minutes)"
	@echo "make constraints record the installed versions in .ci/constraints.txt"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("labkit needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[test]'
	touch $@

lab: setup
	$(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb $(AS_ROOT) $(LAB_OPTIONS)

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_OPTIONS)

check: lint
	$(BIN)/python -m pytest -m "check or not (spawns or kernel or cluster or notebook or browser)" $(PYTEST_OPTIONS)

notebooks: setup
	$(BIN)/python tests/run_notebooks.py --out build/notebooks $(PARAMETERS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: setup
	$(BIN)/python tests/benchmarks/launch.py

scoreboard: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[rivals]'
	$(BIN)/python -m tests.benchmarks.scoreboard --write-readme $(SCOREBOARD_OPTIONS)

constraints: setup
	$(BIN)/python -m pip freeze --exclude-editable > .ci/constraints.txt

clean:
	rm -rf $(VENV) build
