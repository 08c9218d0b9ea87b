# Everything a person or CI does with this repository. `make help` lists the targets.
#
# `setup` brings a fresh Debian 12 or 13 (root, apt, pip) to where all others work, and does nothing the
# second time. It stays in this folder but for the Debian packages that are missing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .venv-tools
UV := $(TOOLS)/bin/uv
# uv does not read pip's configuration: where that names an index of the site's own, uv is told.
INDEX = $(or $(PIP_INDEX_URL),$(shell $(TOOLS)/bin/python -m pip config get global.index-url 2>/dev/null))
RUN_UV = $(if $(INDEX),UV_DEFAULT_INDEX=$(INDEX)) $(UV)

# One resolution for every Python and machine that is supported, with digests and without a host's name.
COMPILE = $(RUN_UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

# A Dynamo of last year: worker hooks are tested against it too.
OLD_DYNAMO := 1.4.2
OLD_VENV := .venv-dynamo-$(OLD_DYNAMO)
OLD_LOCK := requirements-dynamo-$(OLD_DYNAMO).lock

SETUP := $(VENV)/.installed $(VENV)/.criu $(OLD_VENV)/.installed

export UV_PYTHON_DOWNLOADS := never
export UV_HTTP_TIMEOUT ?= 180

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(SETUP) ## Install everything the others need: packages, virtual environments, a CRIU that works here.

.PHONY: demo
demo: setup ## Run a real Dynamo fleet through a load spike on this machine.
	@$(BIN)/dynamo-snapshot demo

.PHONY: test
test: setup lint types layers ## Lint, types, import layers, unit and integration tests.
	$(BIN)/pytest tests/unit tests/integration

.PHONY: lint
lint: $(VENV)/.installed ## Style and format (ruff).
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(VENV)/.installed ## Types (mypy --strict).
	$(BIN)/mypy

.PHONY: layers
layers: $(VENV)/.installed ## Which module may import which (import-linter).
	$(BIN)/lint-imports

.PHONY: unit
unit: $(VENV)/.installed ## Tests in virtual time; no root, no server.
	$(BIN)/pytest tests/unit

.PHONY: integration
integration: setup ## Tests with real CRIU, etcd, NATS and Dynamo; root.
	$(BIN)/pytest tests/integration

# torch is the machine's own: the lock file names none.
GPU_PYTHON ?= $(PYTHON)

.PHONY: test-gpu
test-gpu: ## Tests on a real GPU, with the Python that has torch there (GPU_PYTHON=); root.
	PYTHONPATH=.:tests $(GPU_PYTHON) -m pytest tests/gpu

.PHONY: bench
bench: setup ## What this project itself adds to a restore, on an idle machine.
	$(BIN)/dynamo-snapshot bench control-path

# Where the four published traces lie (docs/policy.md), and which halves of them.
TRACES ?= traces
HALF ?= first

.PHONY: bench-policy
bench-policy: $(VENV)/.installed ## Scaling policies on published traces (TRACES=folder HALF=first); goes on where it was stopped.
	$(BIN)/dynamo-snapshot policy bench $(TRACES) --half $(HALF) \
	  --json docs/benchmarks/policy.json --plot docs/benchmarks/policy-$(HALF).svg

.PHONY: format
format: $(VENV)/.installed ## Format the code and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: $(UV) ## Resolve the dependencies anew and write the lock files.
	$(COMPILE) --override requirements.overrides --all-extras pyproject.toml -o requirements.lock
	$(COMPILE) $(OLD_LOCK:.lock=.txt) -o $(OLD_LOCK)
	echo uv | $(COMPILE) - -o requirements-tools.lock

.PHONY: clean
clean: ## Remove what setup and the tests made; the Debian packages stay.
	rm -rf $(VENV) $(TOOLS) .venv-dynamo-* build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What Debian has to bring: a Python that can make virtual environments, the tools of a replica's house, and
# ps and capsh for the tests.
$(TOOLS)/bin/python:
	@missing=(); \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv); \
	{ command -v unshare && command -v nsenter; } >/dev/null || missing+=(util-linux); \
	{ command -v mount && command -v umount; } >/dev/null || missing+=(mount); \
	command -v ps >/dev/null || missing+=(procps); \
	command -v capsh >/dev/null || missing+=(libcap2-bin); \
	[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates); \
	if (( $${#missing[@]} )); then \
	  apt-get -q update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$${missing[@]}"; \
	fi
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else \
	  f"Python 3.11 to 3.13 is needed, {sys.version.split()[0]} is there: name another with PYTHON=")'
	$(PYTHON) -m venv $(TOOLS)

$(UV): requirements-tools.lock $(TOOLS)/bin/python
	$(TOOLS)/bin/python -m pip install --quiet --require-hashes -r requirements-tools.lock
	@touch $@

# `sync` removes what no lock names, so the project itself follows it.
$(VENV)/.installed: requirements.lock pyproject.toml $(UV)
	@[ -x $(BIN)/python ] || $(RUN_UV) venv --python $(PYTHON) $(VENV)
	@$(RUN_UV) pip sync --python $(BIN)/python --require-hashes requirements.lock
	@$(RUN_UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.criu: $(VENV)/.installed
	$(BIN)/dynamo-snapshot install-criu
	@touch $@

$(OLD_VENV)/.installed: $(OLD_LOCK) $(UV)
	@[ -x $(OLD_VENV)/bin/python ] || $(RUN_UV) venv --python $(PYTHON) $(OLD_VENV)
	@$(RUN_UV) pip sync --python $(OLD_VENV)/bin/python --require-hashes $(OLD_LOCK)
	@touch $@
