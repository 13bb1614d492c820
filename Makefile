# make demo: train on this machine, from nothing. make test: every test. Both make the virtual environment they need.
VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test lint format bench proto clean

demo: $(VENV)/.installed
	$(BIN)/swarmkit local

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "swarmkit needs Python 3.11 or newer on the PATH"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large: this can take some minutes)"
	$(INSTALL) -e '.[plots]'
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large: this can take some minutes)"
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

proto: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. swarmkit/peers/control.proto

clean:
	rm -rf $(VENV) build dist *.egg-info
