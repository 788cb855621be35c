# On a fresh machine with Python 3.11 or newer and make, `make demo` and `make test` do all their set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VIEW := build/view
CODE := squinchcomm kernels transport tests benchmarks tools deploy examples dashboards
MAKEFLAGS += --no-print-directory

.PHONY: help demo test test-full lint format bench wheel setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small language model over a slow link, in float32 and in 6 bits (80 s after set-up)"
	@echo "make test       tests; test-full adds the slow ones"
	@echo "make lint       ruff, mypy, import contracts; format: ruff format"
	@echo "make bench      all-reduce on shaped links beside gloo, quick set (root gives real network namespaces)"
	@echo "make wheel      build dist/*.whl"
	@echo "make clean      remove everything that make made"

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile tools/system-packages.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; set PYTHON=..."; exit 1; }
	@sh tools/system-packages.sh
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# A second MPI for its tests, in a folder of its own: both bring an mpirun.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --prefix $(VENV)/mpich mpich
	@touch $@

demo: $(STAMP)
	$(BIN)/squinchcomm demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-full: $(STAMP)
	@sh tools/system-packages.sh full
	$(BIN)/python -m pytest -m '' $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python tools/source_view.py $(VIEW)
	$(BIN)/python tools/source_view.py $(VIEW) --run $(BIN)/mypy $(VIEW)/squinchcomm tools dashboards
	MYPYPATH=benchmarks $(BIN)/mypy --follow-imports=silent benchmarks
	cd $(VIEW) && $(abspath $(BIN))/lint-imports --no-logo $(CURDIR)/pyproject.toml

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(STAMP)
	$(BIN)/python benchmarks/links.py --quick $(ARGS)

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
