# `make` lists the tasks. `make run` and `make test` set everything up by themselves on a machine with Python 3.11+.

# The system's Python first, if it can do it: distributions optimize theirs by profile, and Duetime is a quarter faster
# on it than on one that was just compiled. `make run PYTHON=/path/to/python3` takes another.
FITS := 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell /usr/bin/python3 -c $(FITS) 2>/dev/null && echo /usr/bin/python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
VENV_BENCH := .venv-bench
READY_BENCH := $(VENV_BENCH)/.ready

.DEFAULT_GOAL := help
.PHONY: help run test check format lint types bench bench-full crash broker-crash chaos isolation mutants upgrade screenshots lock clean postgres15 chromium

help: ## list the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(READY) ## start the service on http://localhost:3000
	@$(BIN)/duetime serve

test: $(READY_DEV) ## run the tests
	@$(BIN)/python -m pytest

check: $(READY_DEV) format lint types test ## what CI runs: format, lint, types, tests

format: $(READY_DEV) ## check the formatting (`make format FIX=1` mends it)
	@$(BIN)/ruff format $(if $(FIX),,--check) .

lint: $(READY_DEV) ## check the code (`make lint FIX=1` mends what can be mended)
	@$(BIN)/ruff check $(if $(FIX),--fix,) .

types: $(READY_DEV) ## check the types
	@$(BIN)/mypy

bench: $(READY_DEV) $(READY_BENCH) ## measure throughput and lateness beside ceilings and peers, in about seven minutes
	@$(BIN)/python -m bench $(if $(ROUNDS),--rounds $(ROUNDS))

bench-full: $(READY_DEV) $(READY_BENCH) ## the same in rounds and with ten million pending timers, for docs/benchmarks.md
	@$(BIN)/python -m bench --full $(if $(ROUNDS),--rounds $(ROUNDS))

crash: $(READY_DEV) ## kill -9 the service 100 times under load and count what was lost
	@$(BIN)/python -m tests.e2e.crash --kills 100

broker-crash: $(READY_DEV) ## kill -9 the broker and the service 20 times each under commands and count what was lost
	@$(BIN)/python -m tests.e2e.broker_crash --commands 20000 --broker-kills 20 --instance-kills 20

chaos: $(READY_DEV) isolation upgrade ## do all kinds of harm to a cluster under load, for an hour, and count what was lost
	@$(BIN)/python -m tests.chaos

isolation: $(READY_DEV) ## measure on both stores what one tenant's trouble does to another, in about half an hour
	@$(BIN)/python -m tests.isolation --store both

mutants: $(READY_DEV) ## change the code in small ways and see which changes no test notices (`make mutants SAMPLE=200`, or MODULES="retry service")
	@$(BIN)/python -m tests.mutants $(MODULES) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(JOBS),--jobs $(JOBS)) $(if $(DOCUMENT),--document)

upgrade: $(READY_DEV) ## replace the last release by this version and back under load, and count what was lost or sent twice
	@$(BIN)/python -m tests.upgrade

screenshots: $(READY_DEV) ## make the pictures of the web page that are in docs/images
	@$(BIN)/python -m tests.web.screenshots

COMPILE := $(VENV)/lock/bin/uv pip compile --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --upgrade -q

lock: ## write the lock files anew from pyproject.toml and requirements-bench.in
	@$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/pip install -q uv
	@$(COMPILE) pyproject.toml -o requirements.lock
	@$(COMPILE) pyproject.toml --extra dev -o requirements-dev.lock
	@$(COMPILE) requirements-bench.in -o requirements-bench.lock

clean: ## remove what was set up
	rm -rf $(VENV) $(VENV_BENCH) bench/peers/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis .mutants

# A lock file names all there is to install. Told to look for nothing else, pip asks for no versions that it does not name.
INSTALL := pip install -q --disable-pip-version-check --require-hashes --no-deps -r

# A venv for running, and what developing adds to it. The package itself is linked, so a change needs no new install.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Duetime needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make run PYTHON=/path/to/python3.11")'
	@echo "setting up $(VENV) (once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m $(INSTALL) requirements.lock
	@$(BIN)/python -c 'import sysconfig, pathlib; pathlib.Path(sysconfig.get_path("purelib"), "duetime.pth").write_text(str(pathlib.Path("src").resolve()))'
	@printf '#!%s\nimport sys\nfrom duetime.cli import main\nsys.exit(main())\n' "$(abspath $(BIN))/python" > $(BIN)/duetime
	@chmod +x $(BIN)/duetime
	@touch $@

# The oldest PostgreSQL that is supported comes from Debian; the newest is a Python package of the lock file. Only the
# programs are wanted: Debian is kept from making a database of its own.
POSTGRES15 := /usr/lib/postgresql/15/bin/postgres
CREATECLUSTER := /etc/postgresql-common/createcluster.conf
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends -o DPkg::Lock::Timeout=120

postgres15:
	@echo "installing PostgreSQL 15 for the tests (once) ..."
	@test -e $(CREATECLUSTER) || { mkdir -p $(dir $(CREATECLUSTER)) && echo "create_main_cluster = false" > $(CREATECLUSTER); }
	@apt-get update -qq && $(APT_INSTALL) postgresql-15 > /dev/null

# What the web page is tested in.
CHROMIUM := /usr/bin/chromium

chromium:
	@echo "installing Chromium for the tests (once) ..."
	@apt-get update -qq && $(APT_INSTALL) chromium > /dev/null

$(READY_DEV): $(READY) requirements-dev.lock
	@echo "setting up the tools of developers (once) ..."
	@$(BIN)/python -m $(INSTALL) requirements-dev.lock
	@test -x $(POSTGRES15) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s postgres15 || \
	  echo "PostgreSQL 15 could not be installed: the tests that need it will be skipped"
	@test -x $(CHROMIUM) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s chromium || \
	  echo "Chromium could not be installed: the tests of the web page will be skipped"
	@touch $@

# The peers of the benchmark have a venv of their own, which brings Node.js, too; only Redis and wrk are programs of the
# system. A machine where they can't be had still measures Duetime.
$(READY_BENCH): requirements-bench.lock bench/peers/package-lock.json
	@echo "setting up the peers of the benchmark (once) ..."
	@{ command -v redis-server && command -v wrk; } > /dev/null || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || \
	  { apt-get update -qq && $(APT_INSTALL) redis-server wrk > /dev/null; } || echo "Redis and wrk could not be installed"
	@{ test -x $(VENV_BENCH)/bin/python || $(PYTHON) -m venv $(VENV_BENCH); } && echo "*" > $(VENV_BENCH)/.gitignore && \
	  $(VENV_BENCH)/bin/python -m $(INSTALL) requirements-bench.lock && \
	  (cd bench/peers && PATH="$(abspath $(VENV_BENCH))/bin:$$PATH" npm ci --silent --no-audit --no-fund) && touch $@ || \
	  echo "the peers of the benchmark could not be installed: it is run without them"
