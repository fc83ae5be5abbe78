# The same commands run here, in .ci/run and on GitHub. Start with: make demo

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
# Keeps the repository root off sys.path: its folder kernels/ must not shadow the package of that
# name which transformers looks for.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-gpu check types bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mla_ops needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP) ## create .venv and install the package, editable, with every development tool

demo: install ## run the demonstration
	$(VENV)/bin/mla-ops demo

test: install ## run the fast tests (a few minutes, no GPU needed)
	$(VENV)/bin/pytest --numprocesses auto --maxprocesses 8

test-all: install ## run the slow sweeps too
	$(VENV)/bin/pytest --numprocesses auto --maxprocesses 8 -m 'not gpu'

test-gpu: install ## run the tests that need a CUDA device
	$(VENV)/bin/pytest -m gpu

check: install types ## lint, formatting, types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror kernels/cpu/*.h kernels/cpu/*.cpp

# mypy reads neither setuptools' editable finder nor its package-dir mapping, so it gets the
# sources laid out as they are installed. Paths in its output are those of the installed package.
types: install ## check the types (mypy --strict)
	rm -rf build/types && mkdir -p build/types && cp -R mla_ops build/types/ && cp -R passes kernels build/types/mla_ops/
	cd build/types && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache --package mla_ops

bench: install ## measure speed and memory on this machine
	$(VENV)/bin/mla-ops bench

docs: install ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean: ## remove everything that the other targets made
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
