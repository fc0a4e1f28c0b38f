# make demo and make test are the two to know; make help lists all.
SHELL := /bin/bash
PG_CONFIG ?= pg_config
.DEFAULT_GOAL := help
.PHONY: help setup demo test check install bench bench-quick soak fuzz clean-servers
MINUTES ?= 10

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Bring what this machine lacks (Debian; root or sudo)
	@scripts/setup

demo: ## Hash every file under /usr/share/doc with workers in two languages
	@scripts/setup demo
	@scripts/install-prefix release >/dev/null
	@.venv/bin/python examples/demo/demo.py

test: ## Run every test but the soaks
	@scripts/setup
	@scripts/test

check: ## Formatting, lints, licences, install script, house rules
	@scripts/setup
	@scripts/check

install: ## Install into the server that PG_CONFIG names
	@scripts/install "$(PG_CONFIG)"

bench: ## Measure against bare tables on this machine (some hours)
	@scripts/setup demo
	@scripts/install-prefix release >/dev/null
	@.venv/bin/python bench/run.py --write-docs

bench-quick: ## The same small, in some minutes: are the counts right?
	@scripts/setup demo
	@scripts/install-prefix release >/dev/null
	@.venv/bin/python bench/run.py --quick

MINUTES ?= 10
soak: ## The random tests, with kills and crashes and against the model: make soak MINUTES=10
	@scripts/setup
	@AWA_CHAOS_SECONDS=$$(( $(MINUTES) * 60 )) AWA_LIFE_SECONDS=$$(( $(MINUTES) * 60 )) scripts/test -m chaos

fuzz: ## Every function with arguments at random, for MINUTES (10)
	@scripts/setup
	@scripts/install-prefix test >/dev/null
	@AWA_FUZZ_SECONDS=$$(($(MINUTES) * 60)) .venv/bin/python -m pytest -c tests/pytest.ini --rootdir tests -s \
	    --timeout $$(($(MINUTES) * 60 + 300)) tests/test_fuzz.py

clean-servers: ## Stop and remove servers that a killed run left behind
	@.venv/bin/python -c 'import sys; sys.path.insert(0, "tests"); from harness.server import sweep; sweep()'
