# `make` alone lists what there is.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help train test test-fast smoke lint types clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

train: $(VENV)/.run  ## train; overrides by ARGS="ffn=gelu seed=3"
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/.dev  ## run every test
	$(BIN)/pytest $(ARGS)

test-fast: $(VENV)/.dev  ## run the tests that take no more than a few seconds
	$(BIN)/pytest -m "not slow" $(ARGS)

smoke: $(VENV)/.run  ## the copy task for three blocks, in under a minute
	for block in relu gelu swiglu; do $(BIN)/python train.py experiment=copy_task ffn=$$block logger=none || exit 1; done

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

clean:  ## remove what can be made again (outputs/ stays)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first, at its pinned version, so that nothing else chooses another build of it.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
