# Needs make, sh and a Python >= 3.12; everything else goes into a virtual environment in this folder.
#
#   make demo    run examples/decode_loop.py         ARGS="..." is handed on to the example
#   make test    run the tests                       ARGS="-k router -x" is handed on to pytest
#                (adds the compiler for NVIDIA GPUs, 260 MB of downloads, for the tests marked aot)
#   make lint    ruff and mypy
#   make package build wheel and sdist, and try both in environments that have nothing else
#   make bench   measure (benchmarks.run)         ARGS="--help" lists the flags, ARGS=--tiny suits a CPU
#   make tables  write README's performance table from benchmarks/results
#   make clean   remove the environments and caches
#
#   PYTHON=/path/to/python   the Python to build on (found by itself otherwise)
#   JAX=latest               in an environment of its own (.venv-latest) with the newest releases of
#                            jax and everything else, in place of those that constraints.txt pins

ARGS ?=
JAX ?=
PYTHON ?=
export PYTHON
export MAKECMDGOALS
# What is set for another Python has no place in ours.
unexport PYTHONHOME
unexport PYTHONPATH

EXTRAS := test,lint,examples,flax,checkpoints

ifeq ($(JAX),)
VENV := .venv
PIP_OPTIONS := --constraint constraints.txt
else ifeq ($(JAX),latest)
VENV := .venv-latest
PIP_OPTIONS :=
else
$(error JAX=$(JAX) is not known: leave it out for the jax that constraints.txt pins, or use JAX=latest)
endif

BIN := $(VENV)/bin
STAMP := $(VENV)/.made
AOT := $(VENV)/aot/.made
TYPED := moe_pallas benchmarks $(patsubst %/,%,$(dir $(firstword $(wildcard examples/*.py))))

.PHONY: help demo test lint package bench tables clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(STAMP)
	$(BIN)/python examples/decode_loop.py $(ARGS)

test: $(AOT)
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy $(TYPED)

package: $(STAMP)
	@sh .ci/package.sh $(BIN)/python $(PIP_OPTIONS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS)

tables: $(STAMP)
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf .venv .venv-latest .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find moe_pallas tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp says where and with which PYTHON the environment was made. It is void, and the environment
# is made again, when its Python is gone, the folder was moved or copied, or another PYTHON is asked for.
$(shell test -x $(BIN)/python && grep -sqxF 'in $(CURDIR)' $(STAMP) \
    && { test -z '$(PYTHON)' || grep -sqxF 'with $(PYTHON)' $(STAMP); } || rm -f $(STAMP))

$(STAMP): pyproject.toml constraints.txt .ci/venv.sh
	@sh .ci/venv.sh $(VENV) $(EXTRAS) $(PIP_OPTIONS)
	@printf 'in %s\nwith %s\n' '$(CURDIR)' '$(PYTHON)' > $@

# Without it the tests marked aot are skipped, and say so: no reason to run none.
$(AOT): $(STAMP) .ci/aot.sh
	@sh .ci/aot.sh $(VENV) $(PIP_OPTIONS)
