# Every command of the project; `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # the tests start Python hundreds of times: it need not compile everything each time
.PHONY: help setup run test quick test-services test-faults test-docker bench screenshots lint format fuzz golden lock hashes wheelhouse images push sbom \
	licences audit clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## make .venv from the lock (once)

$(STAMP): requirements/dev.txt pyproject.toml
	@echo "setting up $(VENV) from requirements/dev.txt (some minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

run: $(STAMP)  ## run digits-b0c2 with csc through the compiled pipeline, print the results
	@$(BIN)/csc run digits-b0c2

PROCESSES := -n 2 --dist loadgroup --no-loadscope-reorder # in the order of tests/conftest.py: longest first
test: lint $(STAMP)  ## lint, type-check and run all tests that need nothing but .venv
	$(BIN)/python -m pytest $(PROCESSES) -m "not services"

quick: lint $(STAMP)  ## lint, type-check and run the tests that take seconds
	$(BIN)/python -m pytest $(PROCESSES) -m "not slow and not services"

test-services: $(STAMP)  ## tests with PostgreSQL, an object store, Chromium, and the packages of the images (minutes)
	$(BIN)/python -m pytest $(PROCESSES) -m services

test-faults: $(STAMP)  ## kills, full disks, flipped bits, bad servers (25 minutes; FAULT=name SEED=n repeats one)
	FAULTS=all FAULT=$(FAULT) SEED=$(SEED) PHASE=$(PHASE) $(BIN)/python -m pytest -n 2 --dist loadgroup tests/faults

test-docker: $(STAMP)  ## build the images and run their tests (minutes, 18 GB of disk; needs Docker, or root on Debian)
	$(BIN)/python -m pytest -m docker tests/docker

bench: $(STAMP)  ## measure speed as ratios to named limits (BENCH="step load" for some)
	$(BIN)/python -m benchmarks $(BENCH)

screenshots: $(STAMP)  ## take the pictures of the docs from the newest run of work/ (needs Chromium)
	$(BIN)/python docs/screenshots.py work

TYPED := build/typed/csc
lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/csc/* $(CURDIR)/components $(CURDIR)/pipelines $(TYPED)/
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff format the code
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

golden: $(STAMP)  ## write the compiled pipelines that the tests compare with, and the components' READMEs
	@$(BIN)/python -m tests.golden.write

LOCK := uv pip compile --quiet --no-header --no-annotate --python-version 3.11 pyproject.toml
# The embedded digits are one file of scikit-learn, read without its code: an image needs none of what that code needs.
ONE_FILE := $(foreach name,scipy joblib threadpoolctl narwhals,--no-emit-package $(name))
HASHED := dev cpu-image train-image
lock:  ## resolve the newest versions into requirements/, with hashes (needs uv)
	$(LOCK) --constraint requirements/limits.txt --extra dev -o requirements/dev.txt
	for extra in data train tracking pipelines; do \
	  $(LOCK) --constraint requirements/dev.txt --extra $$extra -o requirements/$$extra.txt; done
	$(LOCK) --constraint requirements/dev.txt --extra train --extra client -o requirements/train-image.txt
	$(LOCK) --constraint requirements/dev.txt --extra data --extra client $(ONE_FILE) -o requirements/cpu-image.txt
	for image in cpu train; do grep '^kfp==' requirements/pipelines.txt >> requirements/$$image-image.txt; done
	$(MAKE) hashes

hashes:  ## write the hashes of the versions that the locks name into those that are installed from (needs uv)
	for lock in $(HASHED); do \
	  uv pip compile --quiet --no-header --no-annotate --no-deps --generate-hashes --python-version 3.11 \
	    requirements/$$lock.txt -o requirements/$$lock.txt; done

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' csc/__init__.py)
REVISION = $(shell git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null || echo unknown)
DIGESTS ?= work/images.yaml

images:  ## build the images of the steps (BASE=image, WHEELHOUSE=folder: from its wheels, without network)
	@images/build.sh $(VERSION) $(REVISION)

push:  ## push the images and note their digests for a profile (REGISTRY=host/path)
	@test -n "$(REGISTRY)" || { echo "make push: say where to, REGISTRY=host/path" >&2; exit 2; }
	@images/push.sh $(VERSION) $(REGISTRY) $(DIGESTS)

wheelhouse: $(STAMP)  ## fetch the wheels of the images into WHEELHOUSE=folder, for a place without network
	@test -n "$(WHEELHOUSE)" || { echo "make wheelhouse: say where to, WHEELHOUSE=folder" >&2; exit 2; }
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --dest $(WHEELHOUSE) \
	  -r requirements/cpu-image.txt -r requirements/train-image.txt

sbom: $(STAMP)  ## write what each image is made of as CycloneDX (SBOM=folder, default work/sbom)
	@$(BIN)/python -m images.packages sbom $(or $(SBOM),work/sbom)

licences: $(STAMP)  ## list the licences in the images; fail if one is not allowed
	@$(BIN)/python -m images.packages licences

audit: $(STAMP)  ## look the images' packages up in the database of known vulnerabilities (needs the internet)
	@$(BIN)/python -m images.packages audit

clean:  ## remove runs and caches, keep .venv
	rm -rf work .mypy_cache .ruff_cache .pytest_cache build *.egg-info

fuzz: $(STAMP)  ## parsers of foreign files, given thousands of mutated ones, in 4 GB of memory
	@ulimit -v 4000000; FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-2000} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 tests/fuzz
