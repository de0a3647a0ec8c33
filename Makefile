# Each target does all its own set-up. Settings: make serve PORT=9000 MODEL=Qwen/Qwen2.5-1.5B-Instruct ARGS="--dtype float32"
VENV ?= .venv
PORT ?=
MODEL ?=
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install serve test gpu-compile check format wheel clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

install:  ## create .venv with the jaxserve command and the demo model in it
	@scripts/install $(VENV)

serve: install  ## serve MODEL (unset: the demo model) on PORT, with any other flags in ARGS
	$(BIN)/jaxserve serve $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

test: install  ## run the tests, or those that ARGS names
	$(BIN)/pytest $(ARGS)

gpu-compile: install  ## compile the models for an H200, which need not be there, and check what came out
	@scripts/install-gpu-compile $(VENV)
	$(BIN)/pytest tests/gpu_compile $(ARGS)

check: install  ## format, lint, types, directions of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: install  ## format and mend what can be mended
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

wheel: install  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove everything that was made
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
