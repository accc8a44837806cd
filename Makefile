# From a bare machine: `make demo` and `make test`. Needed: make and Python >= 3.11, nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
PY := $(BIN)/python
# Most tests wait for a server or a process of theirs: more of them at once than cores.
PYTEST := $(BIN)/pytest -n $(or $(WORKERS),4) --dist worksteal
# Containers like to set it. Then every process of the suite, and it starts thousands, compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help dev demo demo-data check format test test-brokers test-slow test-clusters test-vitess test-matrix test-ui test-contract crash crash-brokers chaos models mutants fuzz bench bench-peers bench-soak docs test-docs dist servers servers-down clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

dev: .venv/.synced ## Create .venv with every extra and the development tools, from uv.lock

.venv/.synced: pyproject.toml uv.lock
	@.ci/sync
	@touch $@

demo: dev ## Kill a payment worker again and again, and watch txbox next to a naive consumer
	$(BIN)/txbox demo

demo-data: dev ## Fill an empty DATABASE with a month of a shop, for the dashboard: 2,000,000 rows times SCALE
	@$(PY) -m tests.support.demo_data --database $(or $(DATABASE),sqlite:///demo-shop.db) --scale $(or $(SCALE),1)

check: dev ## Lint, format, types, import floors, names and dialect parity; under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit/test_dialects.py tests/unit/test_names.py

format: dev ## Rewrite the files the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: dev ## Start databases and brokers, run the whole suite on every one of them, stop them
	@$(PY) -m tests.support.servers run -- $(PYTEST) $(ARGS)

test-brokers: dev ## Only the sources against real brokers: Kafka, RabbitMQ, SQS, NATS, Redis
	@$(PY) -m tests.support.servers run -- $(PYTEST) -m "brokers and not slow" $(ARGS)

test-slow: dev ## What takes minutes, one by one: not part of `make test`
	@$(PY) -m tests.support.servers run -- $(BIN)/pytest -m slow $(ARGS)

test-clusters: dev ## Nodes killed: of Galera, of MySQL Group Replication, and a PostgreSQL whose standby lacks the last commits
	@$(BIN)/pytest -v -m slow tests/scenarios/test_clusters.py tests/scenarios/test_failover.py $(ARGS)

test-vitess: dev ## Vitess, which Go builds once in a quarter of an hour: unsharded, an App for each shard, processes killed
	@$(PY) -m tests.support.servers.vitess
	@$(BIN)/pytest -v -m slow tests/scenarios/test_vitess.py $(ARGS)

test-matrix: dev ## Newer and older servers and Pythons, one by one, an hour in all; writes docs/versions.md
	@$(PY) -m tests.release.matrix $(ARGS)

test-ui: dev ## The dashboard, and in a real browser; gets Chromium and axe-core; pictures in build/ui
	@$(PY) -m tests.support.browser
	@$(PY) -m tests.support.servers run --databases -- $(BIN)/pytest -m "slow or not slow" tests/ui $(ARGS)

test-contract: dev ## Check programs against docs/contract.md, right and wrong ones; gets the driver of Node first
	@npm ci --prefix examples/node --no-fund --no-audit
	@$(PY) -m tests.support.servers run --databases -- $(PYTEST) -m "slow or not slow" tests/testing/test_conformance.py tests/scenarios/test_languages.py $(ARGS)

crash: dev ## Kill real processes at every point, and print what became of each; wrong consumers too
	@$(PY) -m tests.support.servers run -- $(BIN)/pytest -v tests/crash tests/worker/test_worker_killed.py tests/scenarios/test_crashes.py $(ARGS)

crash-brokers: dev ## The same with every broker: half an hour; writes docs/reliability/crashes.md
	@$(PY) -m tests.support.servers run -- $(PY) -m tests.crash.brokers $(ARGS)

models: dev ## Check the models of the protocol in every order of their steps; writes docs/reliability/models.md
	@$(PY) -m tests.models

chaos: dev ## Everything goes wrong at once, for MINUTES, by SEED, on each DATABASE=a,b and BROKER=a,b (ARGS=--write-page)
	@$(PY) -m tests.chaos --minutes $(or $(MINUTES),1) $(if $(SEED),--seed $(SEED)) $(if $(DATABASE),--databases $(DATABASE)) $(if $(BROKER),--brokers $(BROKER)) $(ARGS)

mutants: dev ## Deliberate defects of txbox itself, and what notices each; writes docs/reliability/mutants.md (ARGS=--help)
	@$(PY) -m tests.support.servers run -- $(PY) -m tests.mutants $(ARGS)

fuzz: dev ## Ten minutes of generated input: lives of messages beside a model, text from outside (FUZZ=times)
	@TXBOX_FUZZ=$(or $(FUZZ),200) $(PY) -m tests.support.servers run --databases -- $(BIN)/pytest -v -n 2 --timeout 3600 tests/fuzz $(ARGS)

bench: dev ## Measure every bar beside a naive loop and the limit; writes docs/performance.md (ARGS=--help)
	@$(PY) -m tests.support.servers run --durable -- $(PY) -m benchmarks $(ARGS)

bench-soak: dev ## Ten minutes of steady load: rate, latency and memory every 10 s
	@$(PY) -m tests.support.servers run --durable -- $(PY) -m benchmarks SOAK $(ARGS)

bench-peers: dev ## Measure the peers beside txbox; installs them first
	@$(PY) -m tests.support.servers run --durable -- $(PY) -m benchmarks P16 $(ARGS)

docs: .venv/.docs ## Build the documentation site into build/site: open index.html; no server needed
	$(PY) docs/build.py

.venv/.docs: .venv/.synced
	@.ci/sync docs
	@touch $@

test-docs: dev ## Check that the documentation says what the code does
	@$(PY) -m tests.support.servers run --databases -- $(BIN)/pytest tests/docs $(ARGS)

dist: dev ## Build wheel, sdist, SBOM and sums into dist/; check them, in an empty environment and unpacked
	@.ci/dist $(ARGS)

servers: dev ## Start databases and brokers and leave them running
	@$(PY) -m tests.support.servers up

servers-down: dev ## Stop every server of this checkout, and what aborted tests left behind
	@$(PY) -m tests.support.servers down

clean: ## Remove the environment and every cache
	rm -rf benchmarks/peers/.venv benchmarks/peers/node_modules examples/node/node_modules .venv .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
