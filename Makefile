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
.PHONY: help run test test-tidb tidb test-cassandra cassandra check format lint types bench bench-full bench-stores crash broker-crash chaos failover isolation mutants upgrade generated screenshots lock clean postgres15 mariadb mysql prometheus pgbouncer chromium

help: ## list the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(READY) ## start the service on http://localhost:3000
	@$(BIN)/duetime serve

TIDB := .servers/tidb/tidb-server
CASSANDRA := .servers/cassandra/lib

# Two tests at a time, a file in one worker; tests marked `alone` have the machine to themselves.
T := tests
JOBS_TEST = $(or $(JOBS),2)

test: $(READY_DEV) ## run the tests (`make test T=tests/unit` runs a part; JOBS=0 runs them in one process)
	@$(BIN)/python -m pytest -n $(JOBS_TEST) --dist loadfile -rfEs --durations 15 $(T)

test-tidb: $(READY_DEV) $(TIDB) ## run the conformance suite of stores on TiDB, which is built first
	@$(BIN)/python -m pytest -n $(JOBS_TEST) --dist loadfile -rfEs --durations 15 -m tidb $(T)

tidb: $(TIDB) ## build TiDB for test-tidb, once: about 2 GB of downloads and ten minutes (needs Go)

test-cassandra: $(READY_DEV) $(CASSANDRA) ## run the conformance suite of stores on Cassandra, which is downloaded first
	@$(BIN)/python -m pytest -n 0 -rfEs --durations 15 -m cassandra $(T)

cassandra: $(CASSANDRA) ## download Cassandra for test-cassandra, once: 70 MB (needs Java and Maven)

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

bench-stores: $(READY_DEV) ## measure the stores on MySQL and MariaDB beside the least that their steps cost
	@$(BIN)/python -m bench.stores $(if $(ROUNDS),--rounds $(ROUNDS))

crash: $(READY_DEV) ## kill -9 the service 100 times under load and count what was lost
	@$(BIN)/python -m tests.e2e.crash --kills 100

broker-crash: $(READY_DEV) ## kill -9 the broker and the service 20 times each under commands and count what was lost
	@$(BIN)/python -m tests.e2e.broker_crash --commands 20000 --broker-kills 20 --instance-kills 20

chaos: $(READY_DEV) isolation upgrade ## do all kinds of harm to a cluster under load, for an hour, and count what was lost
	@$(BIN)/python -m tests.chaos

failover: $(READY_DEV) ## kill the primary of each database under load, promote its standby, and count what was lost, in half an hour
	@$(BIN)/python -m tests.failover

isolation: $(READY_DEV) ## measure on both stores what one tenant's trouble does to another, in about half an hour
	@$(BIN)/python -m tests.isolation --store both

mutants: $(READY_DEV) ## change the code in small ways and see which changes no test notices (`make mutants SAMPLE=200`, or MODULES="retry service")
	@$(BIN)/python -m tests.mutants $(MODULES) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(JOBS),--jobs $(JOBS)) $(if $(DOCUMENT),--document)

upgrade: $(READY_DEV) ## replace the last release by this version and back under load, and count what was lost or sent twice
	@$(BIN)/python -m tests.upgrade

generated: $(READY_DEV) ## build the clients of all generators from the OpenAPI document and let each make a round trip (Go, Java, Node.js, Rust)
	@$(BIN)/python -m tests.generated --document

screenshots: $(READY_DEV) ## make the pictures of the web page that are in docs/images
	@$(BIN)/python -m tests.web.screenshots

COMPILE := $(VENV)/lock/bin/uv pip compile --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-package duetime-client $(if $(KEEP),,--upgrade) -q

lock: ## write the lock files anew from pyproject.toml and requirements-bench.in (`make lock KEEP=1` keeps what is pinned)
	@$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/pip install -q uv
	@$(COMPILE) pyproject.toml --extra mysql --extra cassandra -o requirements.lock
	@$(COMPILE) pyproject.toml --extra mysql --extra cassandra --extra dev -o requirements-dev.lock
	@$(COMPILE) requirements-bench.in -o requirements-bench.lock

clean: ## remove what was set up
	rm -rf $(VENV) $(VENV_BENCH) build dist sdks/python/build .servers bench/peers/node_modules tests/generated/node_modules tests/linters/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis .mutants

# A lock file names all there is to install. Told to look for nothing else, pip asks for no versions that it does not name.
INSTALL := pip install -q --disable-pip-version-check --require-hashes --no-deps -r

# A venv for running, and what developing adds to it. The package itself is linked, so a change needs no new install.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Duetime needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make run PYTHON=/path/to/python3.11")'
	@echo "setting up $(VENV) (once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m $(INSTALL) requirements.lock
	@$(BIN)/python -c 'import sysconfig, pathlib; pathlib.Path(sysconfig.get_path("purelib"), "duetime.pth").write_text("\n".join(str(pathlib.Path(folder).resolve()) for folder in ("src", "sdks/python/src")))'
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

MARIADB := /usr/sbin/mariadbd

mariadb:
	@echo "installing MariaDB for the tests (once) ..."
	@apt-get update -qq && $(APT_INSTALL) mariadb-server > /dev/null

# MySQL is in no Debian release: it is unpacked into a folder of ours, with the libraries of the release that has it.
MYSQL := .servers/mysql

mysql: | $(READY)
	@$(BIN)/python -m tests.debian sid mysql-server-core $(MYSQL)

# Checks and tests the rules for alerts.
PROMETHEUS := .servers/prometheus

prometheus: | $(READY)
	@$(BIN)/python -m tests.debian bookworm prometheus $(PROMETHEUS) --without-libraries

# TiDB is a Go module that leaves its parser out, which is another module of the same commit.
TIDB_MODULE := github.com/pingcap/tidb
TIDB_COMMIT := 20251126154744-e4e814fdc0af
TIDB_SERVER := $(TIDB_MODULE)@v1.1.0-beta.0.$(TIDB_COMMIT)
TIDB_PARSER := $(TIDB_MODULE)/pkg/parser@v0.0.0-$(TIDB_COMMIT)
TIDB_FOLDER := $(dir $(TIDB))
TIDB_LOG := $(TIDB_FOLDER)build.log

$(TIDB):
	@command -v go > /dev/null || { echo "TiDB can't be built: Go is not installed"; exit 1; }
	@mkdir -p $(TIDB_FOLDER) && rm -rf $(TIDB_FOLDER)source && echo "downloading the source of TiDB (once) ..."
	@go mod download $(TIDB_SERVER) $(TIDB_PARSER) > $(TIDB_LOG) 2>&1 || \
	  { echo "TiDB can't be built: its source could not be downloaded, see $(TIDB_LOG)"; exit 1; }
	@modules="$$(go env GOMODCACHE)" && cp -r "$$modules/$(TIDB_SERVER)" $(TIDB_FOLDER)source && \
	  chmod -R u+w $(TIDB_FOLDER)source && cp -r "$$modules/$(TIDB_PARSER)" $(TIDB_FOLDER)source/pkg/parser && \
	  chmod -R u+w $(TIDB_FOLDER)source
	@echo "building TiDB (once): about 1,900 packages are downloaded or compiled ..."
	@cd $(TIDB_FOLDER)source && go build -v -mod=mod -buildvcs=false -p 2 -tags codes -o ../tidb-server ./cmd/tidb-server 2>&1 | \
	  tee $(abspath $(TIDB_LOG)) | { n=0; while read -r _; do n=$$((n + 1)); test $$((n % 100)) != 0 || echo "  $$n"; done; }
	@rm -rf $(TIDB_FOLDER)source
	@test -x $@ || { echo "TiDB could not be built: see $(TIDB_LOG)"; exit 1; }

# The jars are those of the version in the POM; Maven checks their checksums.
$(CASSANDRA): tests/cassandra.pom.xml
	@command -v java > /dev/null && command -v mvn > /dev/null || \
	  { echo "Cassandra can't be downloaded: it needs Java and Maven"; exit 1; }
	@echo "downloading Cassandra (once) ..."
	@rm -rf $@ && mvn -q -B -C -f tests/cassandra.pom.xml dependency:copy-dependencies -DoutputDirectory=$(abspath $@) || \
	  { rm -rf $@; echo "Cassandra could not be downloaded"; exit 1; }
	@touch $@

PGBOUNCER := /usr/sbin/pgbouncer

pgbouncer:
	@echo "installing PgBouncer for the tests (once) ..."
	@apt-get update -qq && $(APT_INSTALL) pgbouncer > /dev/null

# What the web page is tested in.
CHROMIUM := /usr/bin/chromium

chromium:
	@echo "installing Chromium for the tests (once) ..."
	@apt-get update -qq && $(APT_INSTALL) chromium > /dev/null

$(READY_DEV): $(READY) requirements-dev.lock tests/generated/package-lock.json tests/linters/package-lock.json
	@echo "setting up the tools of developers (once) ..."
	@$(BIN)/python -m $(INSTALL) requirements-dev.lock
	@test -x $(POSTGRES15) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s postgres15 || \
	  echo "PostgreSQL 15 could not be installed: the tests that need it will be skipped"
	@test -x $(MARIADB) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s mariadb || \
	  echo "MariaDB could not be installed: the tests that need it will be skipped"
	@test -d $(MYSQL) || ! command -v dpkg-deb > /dev/null || $(MAKE) -s mysql || \
	  echo "MySQL could not be unpacked: the tests that need it will be skipped"
	@test -d $(PROMETHEUS) || ! command -v dpkg-deb > /dev/null || $(MAKE) -s prometheus || \
	  echo "Prometheus could not be unpacked: the tests of its rules will be skipped"
	@test -x $(PGBOUNCER) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s pgbouncer || \
	  echo "PgBouncer could not be installed: the tests that need it will be skipped"
	@test -x $(CHROMIUM) || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || $(MAKE) -s chromium || \
	  echo "Chromium could not be installed: the tests of the web page will be skipped"
	@! command -v npm > /dev/null || (cd tests/generated && npm ci --silent --no-audit --no-fund) || \
	  echo "the generators for TypeScript could not be installed: the tests of their clients will be skipped"
	@! command -v npm > /dev/null || (cd tests/linters && npm ci --silent --no-audit --no-fund --ignore-scripts) || \
	  echo "the linters of the OpenAPI document could not be installed: their tests will be skipped"
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
