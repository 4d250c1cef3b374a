# Every command of the project; `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup run test quick lint format golden lock clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## make .venv from the lock (once)

$(STAMP): requirements/dev.txt pyproject.toml
	@echo "setting up $(VENV) from requirements/dev.txt (some minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

run: $(STAMP)  ## run digits-b0c2 with csc through the compiled pipeline, print the results
	@$(BIN)/csc run digits-b0c2

test: lint $(STAMP)  ## lint, type-check and run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

quick: lint $(STAMP)  ## lint, type-check and run the tests that take seconds
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff format the code
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

golden: $(STAMP)  ## write the compiled pipelines that the tests compare with, and the components' READMEs
	@$(BIN)/python -m tests.golden.write

LOCK := uv pip compile --quiet --no-header --no-annotate --python-version 3.11 pyproject.toml
lock:  ## resolve the newest versions into requirements/ (needs uv)
	$(LOCK) --constraint requirements/limits.txt --extra dev -o requirements/dev.txt
	for extra in data train tracking pipelines; do \
	  $(LOCK) --constraint requirements/dev.txt --extra $$extra -o requirements/$$extra.txt; done

clean:  ## remove runs and caches, keep .venv
	rm -rf work .mypy_cache .ruff_cache .pytest_cache build *.egg-info
