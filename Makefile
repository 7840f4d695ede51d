# `make demo` and `make test` do all the set-up by themselves: they install into .venv, under constraints.txt.
# No Docker, no root, no service running beforehand.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The pins were tried with Python 3.11, so it is taken where it is there. One without venv is passed over.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)

.PHONY: help demo test lint venv
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1   \2/p' $(MAKEFILE_LIST)

demo: $(STAMP) ## the whole circle on a real model and real prompts; REQUESTS=40 is short, KIND=medusa another kind
	$(BIN)/redraft demo $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(KIND),--kind $(KIND))

# A test that hangs is ended after ten minutes with the stack of every thread. pytest's own summary comes last.
test: export OMP_NUM_THREADS := 2
test: lint ## everything that CI checks
	$(BIN)/python -m pytest --durations=15 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

lint: $(STAMP) ## ruff, mypy, and which folder may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(STAMP) ## only the virtual environment

# The stamp is written last, so that an install that was cut short is done again. The build backend is
# installed first and used as it is, because pip's own build environments do not see the constraints.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "redraft needs Python 3.11 or newer, with venv, on the PATH" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[local,dev]'
	@touch $@
