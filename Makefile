# Every target installs what it needs first (.ci/prepare): Debian packages when root, and .venv.
.DEFAULT_GOAL := help
.PHONY: help demo test test-modes soak check test-real test-cluster bench lock proto clean

PYTHON := .venv/bin/python
# Deepest level first, so that the first failure is the deepest cause. Two processes, at a time a file each, or all tests
# of one open mode: most of the time is waiting, and two cores are enough for them.
LEVELS := tests/t0_pure tests/t1_rpc tests/t2_cache tests/t3_operations tests/t4_mount tests/t5_daemon tests/t6_controller tests/faults

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## make a small image data set, serve, mount and read it, print rates, unmount
	@.ci/prepare
	@$(PYTHON) -m perf.demo

test: ## all tests that need no JVM and no cluster, deepest level first
	@.ci/prepare
	@$(PYTHON) -m pytest --numprocesses 2 --dist loadgroup -m "not long" $(wildcard $(LEVELS) tests/contract)

test-modes: ## the tests of mounts in every other open mode, with features masked to those of Linux 5.14 and 6.6; the long ones
	@.ci/prepare
	@$(PYTHON) -m pytest --numprocesses 2 --dist loadfile -m long tests/t5_daemon tests/faults
	@$(PYTHON) -m pytest --numprocesses 2 --dist loadgroup --open-modes classic,passthrough,as-5.14,as-6.6 tests/t4_mount

MINUTES := 20
soak: ## 200 kills of workers, agent and gate under eight readers in each open mode with a gate (MINUTES=20), 50 restarts, 20 upgrades, a folder of 1,000,000, as many look-ups
	@.ci/prepare
	@$(PYTHON) -m tests.soak --minutes $(MINUTES)
	@$(PYTHON) -m tests.soak --restarts 50
	@$(PYTHON) -m tests.soak --upgrades 20 --kernel-features=-resend
	@$(PYTHON) -m tests.large_folder
	@$(PYTHON) -m tests.many_look_ups

check: ## format, lint, types, layers, generated protocol
	@.ci/prepare
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTHON) proto/generate.py --check

test-real: ## contract tests and whole trees against real Alluxio 2.9.3 servers (Java, Maven)
	@.ci/prepare java
	@FUSECACHE_TEST_CLUSTER=real $(PYTHON) -m pytest $(wildcard tests/contract tests/real)

test-cluster: ## a whole real Kubernetes node and the stories on it (root; the first run builds Kubernetes)
	@.ci/prepare cluster
	@$(PYTHON) -m tests.cluster build
	@FUSECACHE_TEST_CLUSTER=kubernetes $(PYTHON) -m pytest -o faulthandler_timeout=600 tests/cluster

bench: ## fusecache and its open modes against alluxio-fuse, bindfs and native, on the same real Alluxio data
	@.ci/prepare java bench
	@$(PYTHON) -m perf.bench --table first
	@$(PYTHON) -m perf.bench --table kernel-path

lock: ## resolve the dependencies again and write requirements*.lock
	@.ci/prepare
	@.ci/lock

proto: ## generate fusecache/pb from proto/
	@.ci/prepare
	$(PYTHON) proto/generate.py

clean: ## remove .venv and everything the tools left
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
