# Every target installs what it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: setup demo check test test-fast test-slow coverage test-gpu explore test-mindspore test-adapters bench dist docs proto settings clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt setup.py tools/stub_library.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup  ## kill the manager of a bus; then train through three faults to the same weights
	$(BIN)/python examples/00_bus.py
	$(BIN)/python examples/demo.py

bench: setup  ## ratios to other projects and to plain PyTorch; rewrites docs/benchmarks.md
	$(BIN)/python -m tests.bench

test-gpu: setup  ## tests that need a CUDA device
	$(BIN)/pytest tests/gpu

check: setup  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each run prints its slowest tests and writes all durations to .pytest_cache/<target>.xml.
PYTEST = $(BIN)/pytest -n 2 --durations=25 --junitxml=.pytest_cache/$@.xml

test: test-fast test-slow  ## all tests but those of explore, test-gpu, test-mindspore and test-adapters

test-fast: setup  ## unit tests, scenarios, simulators; shows the branch coverage of core/
	$(PYTEST) --dist worksteal --cov --cov-report=term:skip-covered tests/unit tests/scenarios tests/sim

test-slow: setup  ## integration and chaos tests with real processes, examples
	$(PYTEST) --dist loadfile tests/integration tests/chaos tests/bench

coverage: .coverage  ## branch coverage of core/ in the last `make test-fast`, with the missing lines
	$(BIN)/coverage report --show-missing

.coverage:
	$(MAKE) test-fast

.venvs/mindspore/.ready: pyproject.toml
	$(PYTHON) -m venv .venvs/mindspore
	.venvs/mindspore/bin/pip --disable-pip-version-check --quiet install mindspore==2.10.0 'numpy<2' --editable .
	touch $@

test-mindspore: setup .venvs/mindspore/.ready  ## our agent under MindSpore's own msrun (0.8 GB to install)
	$(BIN)/pytest tests/mindspore

.venvs/adapters/.ready: pyproject.toml
	$(PYTHON) -m venv .venvs/adapters
	.venvs/adapters/bin/pip --disable-pip-version-check --quiet install torch==2.13.0 transformers==5.22.2 accelerate==1.15.0 lightning==2.6.6 --editable .
	touch $@

test-adapters: setup .venvs/adapters/.ready  ## Accelerate, transformers and Lightning under taskd run (1 GB to install)
	$(BIN)/pytest tests/adapters

explore: setup  ## every interleaving of two or three ranks and up to two faults
	$(BIN)/pytest -m explore

.venvs/proto/.ready: tools/proto.sh
	$(PYTHON) -m venv .venvs/proto
	.venvs/proto/bin/pip --disable-pip-version-check --quiet install grpcio-tools==1.62.3 'setuptools<81'
	touch $@

proto: .venvs/proto/.ready  ## generated code from src/taskd/wire/*.proto
	tools/proto.sh $(CURDIR)/.venvs/proto/bin/python

.venvs/docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .venvs/docs
	.venvs/docs/bin/pip --disable-pip-version-check --quiet install --requirement docs/requirements.txt
	touch $@

docs: .venvs/docs/.ready  ## the website in site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --strict

WHEEL = $(BIN)/python -m build --no-isolation --wheel --config-setting=--build-option=--plat-name

dist: setup  ## sdist and wheels in dist/, checked as PyPI does, installed, and tried with a small job
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --sdist
	$(WHEEL)=manylinux2014_x86_64
	rm -rf build
	$(WHEEL)=manylinux2014_aarch64
	rm -rf build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/check_dist.py dist

settings: setup  ## docs/reference/settings.md from the settings classes
	$(BIN)/python tools/settings.py

clean:
	rm -rf $(VENV) .venvs build dist site .coverage
