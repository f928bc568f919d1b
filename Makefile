# Two commands: `make serve` and `make test`. Both set everything up first, which takes a second the next time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000
ARGS ?=

.PHONY: help setup serve test lint bench load soak sanitize clean

help:
	@echo "make serve   serve the embedded model on 127.0.0.1:$(PORT)  (PORT=..., ARGS='--drafter none')"
	@echo "make test    lint, type check and all tests"
	@echo "make bench   measure drafters against plain decoding  (ARGS='--concurrency 1')"
	@echo "make load    200 streams on a server for 2 minutes, some slow, some leaving  (ARGS='--streams 50')"
	@echo "make soak    20 minutes of mixed traffic and faults on a server  (ARGS='--duration 300')"
	@echo "make sanitize  run the compiled kernels under AddressSanitizer and UBSan"
	@echo "make clean   remove the virtual environment and caches of tools"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.txt pyproject.toml setup.py $(wildcard dspark/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dspark needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

serve: setup
	$(BIN)/dspark serve --port $(PORT) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/dspark fetch smollm2-135m
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope

bench: setup
	$(BIN)/dspark bench --compare-transformers $(ARGS)

load: setup
	$(BIN)/dspark load --report load.json --plot load.svg $(ARGS)

soak: setup
	$(BIN)/dspark soak --report soak.json --plot soak.svg $(ARGS)

sanitize:
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all \
		tests/csrc/check_kernels.cpp dspark/csrc/kernels_avx2.cpp dspark/csrc/kernels_avx512.cpp -o build/check_kernels
	build/check_kernels

clean:
	rm -rf $(VENV) build dspark/_kernels*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
