# Headrace: `make` lists what there is. What is installed, and from where: deploy/install.py and docs/dependencies.md.

PYTHON ?= python3
MODE ?= aggregated
WORKERS ?=
PREFILL_WORKERS ?=
DECODE_WORKERS ?=
ROUTERS ?= 1
PORT ?= 8000
MODEL ?=
ARGS ?=
# Locked versions with digests; LOCK= installs the newest that fit, from an index that lacks these.
LOCK ?= deploy/locks
export LOCK TORCH_INDEX_URL TRTLLM_INDEX_URL FUZZ_S

VENV := .venv
CLIENTS := .venv-clients
BIN := $(VENV)/bin
INSTALL := $(PYTHON) deploy/install.py
LAYERS_vllm := engine nixl
LAYERS_sglang := sglang
LAYERS_trtllm := trtllm
LAYERS_disagg := nixl
ENGINES := layer-test layer-engine layer-sglang layer-nixl layer-diffusion layer-minilm

# A phase without a test, as options may leave one, is fine.
PYTEST = @run() { $(BIN)/pytest "$$@" $(ARGS) || [ $$? -eq 5 ]; }; run
IN_FILES := --dist loadfile -n
# pytest-xdist would begin with files of many short tests, and wait in the end for one with few long ones.
IN_ORDER := --no-loadscope-reorder $(IN_FILES)
# Other files of tests/integration kill nothing: to import these, too, takes each process of a phase ten seconds.
KILLING = $(sort $(shell grep -rl --include='*.py' 'mark\.fault' tests/integration))
# Real processes, clocks and kills on a shared machine: a test that fails is tried once more, and named in the summary.
ONCE_MORE := --reruns 1 -rR
FAST := -m 'not engine and not fault and not deployment and not deep and not slow' --hypothesis-profile=fast
# Percent of lines and branches that the unit tests must reach. Raise it when the figure has risen; never lower it.
COVERAGE_FLOOR := 81
CLIENT_TESTS = $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir tests/clients --confcutdir tests/clients

# Without bytecode of our own each process compiles us anew, and each run of the tests rewrites all their asserts again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## install into .venv; with ENGINE=vllm|sglang|trtllm or MODE=disagg what that needs too
	@$(INSTALL) base $(LAYERS_$(ENGINE)) $(LAYERS_$(MODE))

layer-%: # one layer of deploy/install.py
	@$(INSTALL) $*

serve: ENGINE ?= vllm
serve: ## install what is missing and start everything (ENGINE=vllm|sglang|sim|trtllm MODE=aggregated|disagg WORKERS=1 PORT=8000 MODEL=)
	@case '$(ENGINE)' in vllm|sglang|sim|trtllm) ;; *) echo "ENGINE is vllm, sglang, sim or trtllm, not '$(ENGINE)'" >&2; exit 2;; esac
	@case '$(MODE)' in aggregated|disagg) ;; *) echo "MODE is aggregated or disagg, not '$(MODE)'" >&2; exit 2;; esac
	@$(INSTALL) base $(LAYERS_$(ENGINE)) $(LAYERS_$(MODE))
	@exec $(BIN)/headrace up --engine '$(ENGINE)' --mode '$(MODE)' --routers '$(ROUTERS)' --port '$(PORT)' \
		$(if $(WORKERS),--workers '$(WORKERS)') $(if $(PREFILL_WORKERS),--prefill-workers '$(PREFILL_WORKERS)') \
		$(if $(DECODE_WORKERS),--decode-workers '$(DECODE_WORKERS)') $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: $(if $(findstring tests/,$(ARGS)),$(ENGINES),test-unit test-system test-faults test-served) ## all tests (many minutes), or ARGS=tests/…
	$(if $(findstring tests/,$(ARGS)),$(PYTEST))

test-unit: layer-test ## unit tests, and the lines and branches that they must reach
	@rm -rf .coverage && mkdir .coverage
	@$(BIN)/coverage run -m pytest $(IN_FILES) 2 $(ONCE_MORE) -m 'not engine' tests/unit $(ARGS) || [ $$? -eq 5 ]
	@[ -n '$(ARGS)' ] || { $(BIN)/coverage combine -q && $(BIN)/coverage report --format=total --fail-under=$(COVERAGE_FLOOR); }
test-system: layer-test ## documented commands, simulations in virtual time, processes beside a real nats-server
	$(PYTEST) $(IN_ORDER) 2 $(ONCE_MORE) tests/docs tests/simulation
	$(PYTEST) $(IN_ORDER) 4 $(ONCE_MORE) -m 'not engine and not fault' tests/integration
test-faults: layer-test ## tests that kill what runs
	$(PYTEST) $(IN_ORDER) 4 $(ONCE_MORE) -m 'fault and not engine and not long_fault' tests/faults $(KILLING)
test-long-faults: layer-test ## tests that kill what runs, again and again (most of an hour)
	$(PYTEST) -m long_fault tests/faults
test-served: $(ENGINES) ## tests with a real engine, but for the longest
	$(PYTEST) $(IN_FILES) 2 $(ONCE_MORE) -m 'engine and not long_engine' tests/engines
test-engines: $(ENGINES) ## all tests with a real engine
	$(PYTEST) $(IN_FILES) 2 $(ONCE_MORE) -m engine tests/engines
test-fast: layer-test ## the unit tests that are soon over, with a fifth of their examples, and those of the documentation (a minute)
	$(PYTEST) $(FAST) $(if $(findstring tests/,$(ARGS)),,$(IN_FILES) 2 tests/unit tests/docs)
test-pythons: layer-uv ## the fast unit tests on each other Python 3.11 to 3.13 that is here, without an engine (minutes)
	@$(BIN)/python -m deploy.package.unit_tests $(BIN)/uv tests/unit $(FAST) $(ONCE_MORE) $(ARGS)
test-clients: layer-base layer-clients ## clients and agents of other projects against the simulator (minutes, after 2 GB of them)
	@cp tests/clients/vercel/ask.mjs $(CLIENTS)/vercel
	@VERCEL=$(CLIENTS)/vercel PROGRAMS=$(CLIENTS)/programs $(CLIENT_TESTS) tests/clients $(ARGS)
test-clients-newest: layer-base layer-clients layer-newest-clients ## the agents in their newest versions, which may fail
	@PROGRAMS=$(CLIENTS)/newest $(CLIENT_TESTS) tests/clients/test_programs.py $(ARGS)
coverage: layer-test ## lines and branches that all tests without an engine reach (half an hour and more)
	@rm -rf .coverage && mkdir .coverage
	$(BIN)/coverage run -m pytest $(IN_FILES) 2 -m 'not engine and not long_fault' $(ARGS) || [ $$? -eq 1 ]
	@$(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered --sort=cover
call-counts: layer-test ## write down what a request costs now, in calls of each process (tests/simulation/cost)
	$(BIN)/python -m tests.simulation.cost
fuzz: layer-fuzz ## fuzz each decoder of strangers' bytes, guided by coverage, for FUZZ_S=5 seconds each (a minute and a half)
	@PYTHONPATH=$(VENV)/fuzz $(BIN)/python -m tests.fuzz

lint: layer-test ## style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
format: layer-test ## bring the code into shape
	$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format .
types: layer-test ## static types
	$(BIN)/mypy
contracts: layer-test ## which package may import which
	$(BIN)/lint-imports --no-cache

docs: layer-docs ## build the documentation as a site with search into build/site
	@$(BIN)/python -m deploy.dev.site $(VENV)/docs/bin/mkdocs
docs-check: layer-test ## run the commands that the documentation shows, check its links and paths
	$(BIN)/pytest tests/docs $(ARGS)

wheels: layer-uv ## build what is published into dist/: sdist, pure wheel, a manylinux wheel per Python that is here
	@$(BIN)/python -m deploy.package.wheels build $(BIN)/uv
wheels-check: layer-uv ## install the pure wheel and serve with it, on each Python 3.11 to 3.13 that is here (a minute)
	@$(BIN)/python -m deploy.package.wheels check $(BIN)/uv
lock: layer-uv ## write down the newest versions that fit, with their digests (deploy/locks)
	@$(BIN)/python -m deploy.package.locks $(BIN)/uv $(ARGS)
audit: layer-uv ## ask a database of vulnerabilities about the locked packages
	@$(BIN)/python -m deploy.package.audit $(BIN)/uv $(sort $(wildcard deploy/locks/*.txt))

monitors: layer-prometheus ## unpack Prometheus and promtool for the tests of alerts and dashboards (Debian's package, 20 MB)
charts: layer-charts ## install Helm's engine and Kubernetes' schemas for the tests of deploy/ (100 MB)
forecasts: layer-forecasts ## install statsforecast for the tests of the planner's forecasters (250 MB)
fuse: layer-fuse ## install what the tests of power cuts need: fuse3 (by apt, as root) and nats-server 2.15.0
browser: layer-browser ## install what the tests of the console need: Chromium (by apt, as root) and axe-core (by npm)

clean: ## remove what was installed and cached, not the data in .headrace
	rm -f router/*/*.so router/*/*.c
	rm -rf $(VENV) .venv-sglang $(CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
