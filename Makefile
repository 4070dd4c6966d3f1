# `make run` and `make test` do all their set-up on a fresh machine. Every install goes through constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-long bench clean

run: $(VENV)/installed
	$(BIN)/onepass run quickstart

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/mypy --strict examples
	$(BIN)/pytest -m "not long" --numprocesses auto --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/pytest -m "kernels and not long" --numprocesses auto --dist worksteal tests/engine

test-long: $(VENV)/installed-dev
	$(BIN)/pytest -m long

bench: $(VENV)/installed
	$(BIN)/onepass bench

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
