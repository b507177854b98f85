# `make` alone lists the targets. Everything runs from .venv, which `make setup` makes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.baton-setup
# Bytecode is compiled by all cores at once, below, and never left to the first import: where PYTHONDONTWRITEBYTECODE is
# set, every stage would import for twice as long.
# `make setup TORCH=cpu` takes torch's CPU build, from TORCH_INDEX or torch's own index.
TORCH ?=
TORCH_INDEX ?=
RECIPE ?= pipelines/recipes/quickstart.yaml
ARGS ?=

# One torch thread per test worker: workers share the machine, three on two cores as tests also wait, and thread counts
# change sums. Bytecode is kept whatever the shell says: tests start `baton` in hundreds of fresh interpreters, and pytest
# rewrites every assertion.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(PY) -m pytest
# Notes what passes; `make passes` merges the notes into tests/passes.json.
RECORDED := $(PYTEST) -p tests.support.plugin
WORKERS ?= 3

.PHONY: help setup run site test test-all test-part test-touched passes test-chaos test-deepspeed test-gpu gpu-evidence gpu-wheels test-schedules fuzz test-mutants test-cluster test-versions lint code-report format typecheck compile golden docs dist images bench lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv from requirements.lock with Baton in it, once (TORCH=cpu: no CUDA, TORCH_INDEX=a mirror)

$(STAMP): requirements.lock torch-cpu.lock pyproject.toml
	@if ! [ -x $(PY) ]; then \
	    python="$${PYTHON:-$$(command -v python3.11 || command -v python3 || true)}"; \
	    if ! "$${python:-python3.11}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	        echo "make setup: Baton needs Python 3.11; '$${python:-python3.11}' is not one." >&2; \
	        echo "Install it, or name it: PYTHON=/path/to/python3.11 make setup" >&2; exit 1; \
	    fi; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	    echo "make setup: $(VENV) holds $$($(PY) -V), Baton needs Python 3.11. Remove $(VENV) and try again." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@TORCH=$(TORCH) TORCH_INDEX=$(TORCH_INDEX) $(PY) -m tools.install
	@$(PY) -m compileall -q -j 0 $(VENV)/lib/python3.11/site-packages >/dev/null 2>&1 || true  # templates do not compile
	@# compat: by a path that editors follow too; setuptools' own hook loses to any folder named baton where one works.
	@$(PY) -m pip install -qq --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@HF_HUB_OFFLINE=1 $(PY) -m baton.train.lazy_imports  # else each process looks it up: half a second
	@touch $@
	@echo "set up; next: source $(VENV)/bin/activate, baton --help"

run: setup ## Run the quickstart recipe here, start to report (RECIPE=… for another)
	$(VENV)/bin/baton run $(RECIPE)

test: setup ## Run the tests that need no GPU and little time (ARGS="-k name" narrows)
	$(RECORDED) -m "not slow and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# In a folder of its own: where it is installed, Accelerate imports it in every chunk, for more than a second.
DEEPSPEED := build/deepspeed
define zero_tests
[ -d $(DEEPSPEED)/deepspeed ] || $(PY) -m pip install --quiet --no-deps --target $(DEEPSPEED) \
    deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0; \
PYTHONPATH=$(CURDIR)/$(DEEPSPEED) $(RECORDED) tests/exactness/test_zero.py tests/exactness/test_zero_sizes.py -v -m "not gpu"
endef
test-deepspeed: setup ## Test DeepSpeed's ZeRO in one to four processes on CPUs; installs the package into build/
	@$(zero_tests) $(ARGS)

test-all: setup ## Run all tests of this machine, also of DeepSpeed and containers; again resumes (on a GPU: make test-gpu)
	@status=0; \
	if docker version >/dev/null 2>&1; then $(PY) images/build.py cpu || status=$$?; fi; \
	$(RECORDED) -m "not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --unpassed $(ARGS) || status=$$?; \
	$(zero_tests) --unpassed $(ARGS) || status=$$?; exit $$status

# Thirteen, a prime: pushes of equally many commits come to each share.
SHARE = $(shell git rev-list --count HEAD)/13
SLOW = -m "slow and not gpu" -n $(WORKERS) --dist load --maxschedchunk 1
test-part: setup ## Run the slow tests of this commit, 20 minutes at most; thirteen commits in a row run all (SHARE=, ARGS=)
	@status=0; \
	$(RECORDED) $(SLOW) --share $(SHARE) --minutes 20 --unpassed $(ARGS) || status=$$?; \
	$(zero_tests) --share $(SHARE) --minutes 5 --unpassed $(ARGS) || status=$$?; exit $$status

# Of the first commit all is new: Git's empty tree.
SINCE ?=
PARENT = $(shell git rev-parse -q --verify HEAD^ || git hash-object -t tree /dev/null)
test-touched: setup ## Run slow tests that import what the last commit touches, nearest first, 10 minutes at most (SINCE=, ARGS=)
	$(RECORDED) $(SLOW) --touched $(or $(SINCE),$(PARENT)) --minutes 10 --unpassed $(ARGS)

RUNS ?= build/passes.jsonl
passes: setup ## Merge what passed, and when, into tests/passes.json and its pages (RUNS="files of several machines")
	$(RECORDED) --collect-only -qq $(RUNS:%=--merge=%)
	$(PY) -m tests.exactness.matrix_table docs/internals/matrix.md
	$(PY) -m tests.support.passes docs/internals/passes.md
	$(PY) -m tests.end_to_end.damage_table docs/internals/damage.md $(wildcard build/damage.jsonl)

MINUTES ?= 60
KILLS ?= 500
test-chaos: setup ## Train for an hour of kills in all stages, outages and full disks (MINUTES=, KILLS=, SEED=; docs/internals/chaos.md)
	$(TEST_ENV) $(PY) -m tools.chaos --minutes $(MINUTES) --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-gpu: setup ## Run the GPU tests and write their table; without a GPU, the part for CPUs (docs/internals/matrix.md)
	$(TEST_ENV) $(PY) -m tests.gpu $(ARGS)

# Without `setup`: the machine with the GPU may have no network. Packages that it lacks come from build/gpu-wheels, which
# `make gpu-wheels` fetches elsewhere.
gpu-evidence: ## Run a GPU's tests and measurements in parts, and write a page and a JSON (ARGS="--dry": on a CPU)
	$(TEST_ENV) $(if $(wildcard $(PY)),$(PY),python3) -m tests.gpu.evidence $(ARGS)

gpu-wheels: ## Fetch the packages that a machine with a GPU and without a network needs (ARGS="--python 3.12")
	$(if $(wildcard $(PY)),$(PY),python3) -m tests.gpu.wheels $(ARGS)

# In a folder of its own: nothing else needs it, and without it `make test` takes threads, a hundred times slower a switch.
GREENLET := build/greenlet
SCHEDULES ?= 1000000
test-schedules: setup ## Try a million orders of events in a simulated store, and planted faults (SCHEDULES=…; ARGS="--minutes 10")
	@[ -d $(GREENLET)/greenlet ] || $(PY) -m pip install --quiet --no-deps --target $(GREENLET) greenlet==3.5.6
	PYTHONPATH=$(CURDIR)/$(GREENLET) $(PY) -m tools.schedules --number $(SCHEDULES) $(ARGS)

# In a folder of its own: nothing else needs it, and it is built for Linux alone.
ATHERIS := build/fuzz
fuzz: setup ## Feed broken recipes, rows and manifests to their readers (MINUTES=, TARGET=recipe, rows or manifest)
	@[ -d $(ATHERIS)/atheris ] || $(PY) -m pip install --quiet --no-deps --target $(ATHERIS) atheris==3.0.0
	$(TEST_ENV) $(PY) -m tools.fuzz --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(ARGS)
	$(PYTEST) -q tests/tools/test_fuzz.py

test-cluster: setup ## Run the compiled pipeline as pods, some killed (KUBECONFIG, BATON_IMAGE, AWS_…; missing ones are named)
	@for name in KUBECONFIG BATON_IMAGE AWS_ENDPOINT_URL AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY; do \
	    [ -n "$${!name:-}" ] || { echo "make test-cluster: $$name is not set; tests/end_to_end/cluster/conftest.py says what for." >&2; exit 2; }; \
	done
	$(PYTEST) tests/end_to_end/cluster -v $(ARGS)

test-mutants: setup ## Mutate the code that saves and restores, and count the mutants that tests kill (ARGS="--number 400 --seed 2")
	nice -n 15 env $(TEST_ENV) $(PY) -m tools.mutation $(ARGS)

ENDS ?= lowest newest
test-versions: dist ## Train with the lowest and the newest versions that the wheel allows (ENDS=, PYTHON=, ARGS=)
	$(TEST_ENV) $(PY) -m tools.versions $(ENDS) --wheel dist/*.whl $(if $(PYTHON),--python $(PYTHON)) $(ARGS)

lint: setup ## Check ruff, formatting, imports between packages, import cycles and prose
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m tools.code_report --circles
	$(PY) -m tools.prose

code-report: setup ## Measure the code by package: lines, modules, imports, single importers
	$(PY) -m tools.code_report

format: setup ## Fix and format with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: setup ## Check types with mypy
	$(PY) -m mypy

compile: setup ## Compile the recipe to build/quickstart.pipeline.yaml
	@mkdir -p build
	$(VENV)/bin/baton compile $(RECIPE) -o build/$(basename $(notdir $(RECIPE))).pipeline.yaml

golden: setup ## Update the goldens (pipelines, graphs of the docs, the way of the rows, hashed documents); read the diff before you commit
	BATON_GOLDEN=1 $(PYTEST) tests/end_to_end tests/goldens -k golden $(ARGS)

docs: setup ## Write the generated pages: recipe and its JSON Schema, commands, matrix, controls, recipes by model, demands, passes, benchmarks
	$(PY) -m tools.recipe_reference docs/reference/recipe docs/recipe.schema.json
	$(PY) -m tools.cli_reference docs/reference/cli.md
	$(PY) -m tests.exactness.matrix_table docs/internals/matrix.md
	$(PY) -m tests.support.passes docs/internals/passes.md
	$(PY) -m tests.exactness.controls_table docs/internals/controls.md
	$(PY) -m tests.end_to_end.damage_table docs/internals/damage.md
	$(PY) -m tests.gallery docs/guides/recipes.md
	$(PY) -m tests.demands.table docs/internals/demands.md
	$(PY) -m benchmarks.published

# The wheel is built from the sdist, in a folder of its own: nothing of an earlier build gets in. The commit's time in the
# archive makes the wheel of a commit the same bytes wherever it is built.
dist: setup ## Build the sdist and the wheel into dist/
	@rm -rf dist
	@SOURCE_DATE_EPOCH="$${SOURCE_DATE_EPOCH:-$$(git show -s --format=%ct 2>/dev/null || date +%s)}" \
	    $(PY) -m build --quiet --no-isolation --outdir dist .
	@rm -rf baton_llm.egg-info  # here, where Baton is imported from, it would count as one more distribution
	@ls -l dist

# MkDocs has an environment of its own, with the pins of the extra `docs`: nothing else needs it. npm brings the script that
# draws diagrams and the one that searches without a server; pages ask no other machine for anything.
SITE := build/site-tools
SITE_PYTHON = $(if $(wildcard $(PY)),$(PY),$${PYTHON:-python3.11})
site: $(SITE)/.ready ## Build the site of docs/ into build/site; broken links and anchors fail it
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet
	@echo "build/site/index.html"

$(SITE)/.ready: requirements.lock pyproject.toml
	@command -v npm >/dev/null || { echo "make site: needs npm (Debian: apt-get install npm)" >&2; exit 2; }
	@$(SITE_PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/python images/requirements.py docs > $(SITE)/requirements.txt
	@$(SITE)/bin/python -m pip install --quiet --require-hashes --requirement $(SITE)/requirements.txt
	@npm install --silent --no-save --ignore-scripts --no-audit --no-fund --prefix $(SITE) \
	    @mermaid-js/tiny@11.17.2 iframe-worker@1.0.4
	@touch $@

IMAGES ?= cpu
images: ## Build the container images (IMAGES="cpu gpu"; REGISTRY=… pushes; see docs/guides/cluster-setup.md)
	@python="$$(command -v $(PY) || command -v python3.11 || command -v python3)"; "$$python" images/build.py $(IMAGES)

# In a folder of its own: only the processes of these rows see it. rclone's mount needs Debian's rclone and fuse3.
OPPONENTS := build/opponents
bench: setup ## Measure checkpoints and chunks against training without Baton (ARGS="--quick", "--only restore", …)
	@[ -d $(OPPONENTS)/pytorch_lightning ] || $(PY) -m pip install --quiet --no-deps --target $(OPPONENTS) \
	    pytorch-lightning==2.6.6 torchmetrics==1.9.0 lightning-utilities==0.15.3 \
	    runai-model-streamer==0.17.0 runai-model-streamer-s3==0.17.1 humanize==4.17.0
	$(PY) -m benchmarks $(ARGS)

# Pins already in the lock stay; `make lock ARGS=--upgrade` moves them all, ARGS="--upgrade-package NAME" one.
lock: ## Resolve pyproject.toml into requirements.lock, constraints.lock and torch-cpu.lock
	@[ -x $(PY) ] && $(PY) -c 'import piptools' || { echo "make lock: run make setup first" >&2; exit 1; }
	$(PY) -m tools.lock $(ARGS)

clean: ## Remove what was built and cached; .venv and baton-store stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find baton components pipelines tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
