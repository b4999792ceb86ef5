# `make demo` and `make test` set up what they need in .venv, and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Torch comes first and alone, as the CPU build; whatever torch is already there is kept.
# To use the torch of the system (a CUDA build, say): make VENV_FLAGS=--system-site-packages demo
VENV_FLAGS ?=
TORCH_VERSION ?= 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test pytest test-slow test-vllm lint docs setup vllm clean

demo: setup
	$(BIN)/scalerl demo

test: lint pytest

pytest: setup
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: setup
	$(BIN)/python -m pytest -m slow -s

# Against vLLM itself: three starts, each a minute or two.
test-vllm: setup vllm
	$(BIN)/python -m pytest -m slow -s -rs tests/rl/engine/vllm/test_vllm.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Not --quiet, which would hide its warnings from --strict too.
docs: setup
	$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null \
	  || $(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# vLLM for CPUs in .vllm-venv, for what generates with it: its pins are not those of scalerl.
vllm:
	PYTHON=$(PYTHON) CPU_INDEX=$(CPU_INDEX) scripts/vllm_venv.sh

setup: $(VENV)/ready

$(VENV)/python-ready:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scalerl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	touch $@

# A local CPU wheel serves where there is one, and PyTorch's own CPU index everywhere else.
$(VENV)/torch-ready: $(VENV)/python-ready
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(BIN)/pip install --quiet 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	  || $(BIN)/pip install --quiet 'torch==$(TORCH_VERSION)' --index-url $(CPU_INDEX)
	touch $@

$(VENV)/ready: $(VENV)/torch-ready pyproject.toml
	$(BIN)/pip install --quiet --editable '.[train,data,dev]'
	touch $@

clean:
	rm -rf $(VENV) .vllm-venv
