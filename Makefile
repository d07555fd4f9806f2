BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 3
RUN_TESTS = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES)

.DEFAULT_GOAL := help
.PHONY: help install serve test test-all test-costs pytest lint clean

help:  ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/.installed  ## Set up .venv with all that serving needs

# What drafts best for the bundled model by docs/benchmarks.md; TANDEM_SPECULATIVE_CONFIG= serves without drafts.
serve: export TANDEM_SPECULATIVE_CONFIG ?= {"method": "suffix"}
serve: .venv/.installed  ## Serve the bundled model on 127.0.0.1:8000 (ARGS="--port 9000" for options)
	exec $(BIN)/tandem serve $(ARGS)

test: lint pytest  ## Run the checks and the fast tier of tests (PYTEST_ARGS="tests/router -k drain" to choose)

test-all: lint .venv/.compiled  ## Run the checks and all tests, the randomized ones with fresh seeds
	$(RUN_TESTS) --tier full $(PYTEST_ARGS)

test-costs: .venv/.compiled  ## Run all tests and write what they cost to tests/costs.json
	$(RUN_TESTS) --tier full --seed 0 --record-costs $(PYTEST_ARGS)

pytest: .venv/.compiled
	$(RUN_TESTS) --tier fast $(PYTEST_ARGS)

lint: .venv/.installed-test  ## Run ruff, mypy, the import rules and the check of docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.plain_docstrings

clean:  ## Remove the virtual environment and every cache
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/.installed: pyproject.toml deploy/install.sh
	deploy/install.sh

.venv/.installed-test: pyproject.toml deploy/install.sh
	deploy/install.sh test

# One process compiles what the tests import, or each of theirs would: for most of a minute.
.venv/.compiled: .venv/.installed-test
	-env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only --quiet --tier fast > $@
