# Two commands do everything on a fresh machine: make lab, make test. Who changes a line asks make check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment with the oldest versions, and the copy of the tests that runs there on the wheel.
OLDEST := build/oldest
OLDEST_TESTS ?= @.ci/oldest-tests.txt
# The environment with the newest versions, whichever they are today.
NEWEST := build/newest
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Parameters for `make notebooks`, for example: make notebooks PARAMETERS="-p seed 1"
PARAMETERS ?=
# Tests also wait, half of the time: a process a core, and two more, but not so many that ranks fill the memory.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 2 + (os.cpu_count() or 1)))')
SEVERAL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup lab test test-wide test-long check dist test-oldest test-newest test-gpu notebooks site lint format constraints benchmarks clean

help:
	@echo "Times were measured on a virtual machine with two cores of an AMD EPYC at 2.6 GHz, with Python 3.11."
	@echo
	@echo "make lab         set up if needed (took 1 min 59 s), open JupyterLab on the first notebook"
	@echo "make test        set up if needed, run the tests: took 9 min"
	@echo "make test-wide   and more cases of each kind, as CI does once a week: took 38 min, beside other work"
	@echo "make test-long   and more of each kind, lessons on pretended GPUs, and 1,000 launches in one kernel"
	@echo "make check       lint, and the quick tests, with one launch and one lesson: took 1 min"
	@echo "make dist        build the wheel and the source distribution in build/dist"
	@echo "make test-oldest install the wheel with the oldest versions, in build/oldest, and run .ci/oldest-tests.txt there"
	@echo "make test-newest run the tests with the newest version of everything, in build/newest, as CI does once a week"
	@echo "make test-gpu    what only a GPU can show, with the torch that is there"
	@echo "make notebooks   run every notebook headless; the executed ones are in build/notebooks"
	@echo "make site        the guide, the lessons as they ran, a reference of every name and error, with a search: build/site"
	@echo "make lint        ruff, mypy, and what may import what"
	@echo "make benchmarks  measure the figures that notebooks/guide/figures.md quotes, but for failures"
	@echo "make constraints record the installed versions in .ci/constraints.txt"

define make_venv
@$(1)/bin/pip --version >/dev/null 2>&1 || { echo "making $(1)"; rm -rf $(1); $(PYTHON) -m venv $(1); } || { rm -rf $(1); \
	echo "$(PYTHON) cannot make an environment with pip; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
endef

# `lab.py` does it, for machines without make, too.
setup:
	@PYTHON="$(PYTHON)" $(PYTHON) lab.py set-up test

lab:
	@PYTHON="$(PYTHON)" $(PYTHON) lab.py

test:
	@PYTHON="$(PYTHON)" WORKERS="$(WORKERS)" $(PYTHON) lab.py test

test-wide:
	LABKIT_WIDE=1 $(MAKE) test

test-long:
	LABKIT_LONG=1 $(MAKE) test

check: lint
	$(BIN)/python -m pytest -m "check or not (spawns or kernel or cluster or notebook or browser)" $(SEVERAL) $(PYTEST_OPTIONS)

# The wheel is built from the source distribution, so that what is missing there is missed here.
dist: setup
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist .

# On a copy of the tests, beside which no labkit lies: they can only find the one that was installed. Where skips are
# forbidden, only those are allowed that ask for a newer version. pip compiles: a module that a rank
# compiles while its time runs, sympy above all, may be cut off half imported.
test-oldest: dist
	$(call make_venv,$(OLDEST))
	$(OLDEST)/bin/python -m pip uninstall -qq --yes labkit-torch
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints-oldest.txt "$$(echo build/dist/*.whl)[lab]" pytest pytest-timeout pytest-xdist hypothesis
	rm -rf $(OLDEST)-tests
	mkdir $(OLDEST)-tests
	cp -r .ci .gitignore tests notebooks pyproject.toml $(OLDEST)-tests
	cd $(OLDEST)-tests && PYTHONPATH= LABKIT_ALLOWED_SKIPS='or newer' ../../$(OLDEST)/bin/python -m pytest -o cache_dir=../oldest-cache $(SEVERAL) $(OLDEST_TESTS) $(PYTEST_OPTIONS)

# cloudpickle 3.1.3 changed what tracebacks show, and nobody was told: so CI asks once a week. First come the versions that
# differ from those of .ci/constraints.txt.
test-newest:
	$(call make_venv,$(NEWEST))
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e ".[test]"
	@$(NEWEST)/bin/python -m pip freeze --all --exclude pip --exclude-editable | diff .ci/constraints.txt - | grep "^[<>]" || true
	$(NEWEST)/bin/python -m pytest -o cache_dir=build/newest-cache $(SEVERAL) $(PYTEST_OPTIONS)

# With whatever Python is asked for: a machine with a GPU has its own torch.
test-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -v tests/gpu

notebooks: setup
	$(BIN)/python -m tests.tools.run_notebooks --out build/notebooks $(PARAMETERS)

# Of lessons that were run before; LESSONS=no does without them.
site: setup
	test -e build/notebooks/00_start_here.ipynb || test "$(LESSONS)" = no || $(MAKE) notebooks
	$(BIN)/python -m tests.tools.make_site --notebooks build/notebooks --out build/site

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: setup
	for each in launch sessions log_cost memory live_view; do $(BIN)/python -m tests.benchmarks.$$each || exit 1; done

# Without a package whose newest version asks for more than Python 3.11.0: Debian 12 has 3.11.2, soupsieve wants 3.11.5.
constraints: setup
	$(BIN)/python -m pip freeze --all --exclude pip --exclude soupsieve --exclude-editable > .ci/constraints.txt

clean:
	rm -rf $(VENV) build
