# Every target installs what it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: setup demo check test test-fast test-slow coverage test-gpu test-torch torch-bin test-browser test-k8s explore soak test-mindspore test-adapters test-floors attack bench dist docs proto settings clean

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

.venvs/axe.js: tools/axe.py
	$(PYTHON) tools/axe.py $@

test-browser: setup .venvs/axe.js  ## the dashboard's pages in Chromium, which is installed if there is none
	tools/browser.sh
	$(BIN)/pytest --durations=10 tests/browser

test-k8s: setup  ## training and clusterd on a real Kubernetes API server, which is built once (7 minutes); as root
	assets=$$(tools/kubernetes.sh) && KUBEBUILDER_ASSETS=$$assets $(PYTEST) --dist worksteal tests/kubernetes

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
	.venvs/adapters/bin/pip --disable-pip-version-check --quiet install torch==2.13.0 transformers==5.22.2 accelerate==1.15.0 lightning==2.6.6 torchtitan==0.3.0 triton==3.9.0 deepspeed==0.19.8 trl==1.16.0 --editable .
	touch $@

test-adapters: setup .venvs/adapters/.ready  ## Accelerate, transformers, Lightning, torchtitan, DeepSpeed under taskd run (2 GB to install)
	$(PYTEST) --dist loadfile tests/adapters

# Versions of torch other than the pinned one. Most have only builds with CUDA: 5 GB each.
TORCH ?= 2.15.0
TORCH_BIN = .venvs/torch-$(TORCH)/bin
TORCH_TESTS = tests/unit/torch tests/unit/agent tests/integration/torch/test_kill.py \
  $(addprefix tests/integration/torch/test_,collectives.py side_groups.py transport.py fsdp.py \
  fsdp_reset.py hsdp.py) \
  $(addprefix tests/integration/run/test_,standby.py script_errors.py)

.venvs/torch-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venvs/torch-$*
	grep -Ev '^(torch|setuptools)==' constraints.txt > .venvs/torch-$*/constraints.txt
	.venvs/torch-$*/bin/pip --disable-pip-version-check --quiet install --no-cache-dir \
	  --constraint .venvs/torch-$*/constraints.txt torch==$* --editable '.[test]'
	touch $@

test-torch: .venvs/torch-$(TORCH)/.ready  ## the tests that touch torch, with TORCH=x.y.z (5 GB to install)
	$(TORCH_BIN)/pytest -n 2 --dist loadfile --durations=10 $(TORCH_TESTS)

torch-bin:  # where the pytest of test-torch is
	@echo $(TORCH_BIN)

.venvs/floors/.ready: pyproject.toml
	$(PYTHON) -m venv .venvs/floors
	.venvs/floors/bin/pip --disable-pip-version-check --quiet install grpcio==1.66.2 grpcio-health-checking==1.62.3 protobuf==4.25.8 cryptography==46.0.5 pyyaml==6.0 prometheus_client==0.20.0 psutil hypothesis pytest pytest-timeout pytest-xdist --editable .
	touch $@

test-floors: .venvs/floors/.ready  ## the bus and clusterd with the oldest supported grpcio, protobuf and cryptography
	.venvs/floors/bin/pytest -n 2 -k "not generated_code" tests/unit/bus tests/unit/wire tests/integration/bus tests/integration/clusterd/test_security.py tests/integration/clusterd/test_tenants.py tests/integration/clusterd/test_tls.py

attack: setup  ## forged calls, floods, planted files against a live clusterd and a live job; at most 4 minutes
	$(BIN)/pytest -x -s -m 'not explore' tests/attack

soak: setup .venvs/adapters/.ready  ## 20 faults under each Trainer; 1,000 on four machines made of network namespaces (hours)
	TASKD_SOAK_FAULTS=20 $(BIN)/pytest -n 0 tests/adapters/test_trainer_chaos.py
	TASKD_SOAK_FAULTS=1000 $(BIN)/pytest -n 0 tests/chaos/test_nodes_chaos.py \
	  tests/integration/run/test_half_jobs.py tests/integration/run/test_own_etcd.py

explore: setup  ## every interleaving of two or three ranks and up to two faults; all seeds of the simulators
	$(BIN)/pytest -m explore
	TASKD_ALL_SEEDS=1 $(PYTEST) tests/sim

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
	$(BIN)/python tools/support.py

clean:
	rm -rf $(VENV) .venvs build dist site .coverage
