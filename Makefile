# make demo and make test need Python 3.11 or newer with its headers, a C and a C++ compiler, and nothing else: they
# make a virtual environment in $(VENV), install moepool there and build it. Later runs do only what changed.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: demo test build lint format clean help

BIN := $(VENV)/bin
CXX_FILES = $(shell find include csrc tests/c tests/native -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# A machine with a GPU and the CUDA toolkit also gets CuPy.
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && { command -v nvcc || ls /usr/local/cuda/bin/nvcc; } >/dev/null 2>&1 && echo ,cuda)

help:
	@echo "make demo     run a small mixture-of-experts model with a pool of expert slots"
	@echo "make test     run the test suite (PYTEST_ARGS=... is handed on)"
	@echo "make build    compile what changed in csrc/"
	@echo "make lint     formatting, style and types; make format mends the formatting"
	@echo "make clean    remove everything that was built, but for $(VENV)"

demo: build
	@$(BIN)/moepool demo

test: build
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

build: $(VENV)/.installed-test
	@$(BIN)/python setup.py -q build_ext --inplace

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.installed-dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist moepool.egg-info moepool/lib moepool/include moepool/*.so moepool/_native/*.so \
		moepool/cmake/moepoolConfigVersion.cmake
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find moepool tests bench -name __pycache__ -prune -exec rm -rf {} +

# The same editable install, once with what the tests need and once with what lint needs.
$(VENV)/.installed-%: pyproject.toml setup.py | $(BIN)/pip
	@echo "Installing moepool and its dependencies ($*$(CUDA)) in $(VENV)"
	@$(BIN)/pip install -q --disable-pip-version-check --config-settings editable_mode=compat \
		-e '.[$*$(CUDA)]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "moepool needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
