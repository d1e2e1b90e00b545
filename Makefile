# Every target sets .venv up first; that takes no time when it is there.
#
#   make demo         distil SmolLM2-135M into a pruned copy of itself (DEMO_ARGS="train.steps=2" adds overrides,
#                     teacher=http://127.0.0.1:8100 names a server that opd teacher serve has started)
#   make test         the default tests (TEST_ARGS="-k losses -x" goes to pytest)
#   make test-slow    those marked slow
#   make lint         ruff and mypy
#   make golden       the losses against the golden files
#   make schema       regenerates docs/configuration.md and recipes/schema.json; make check-schema only compares
#   make bench        seconds a step, the comparison with TRL, and the scoring server
#   make clean        removes .venv and what tools leave behind; the models in the cache stay
#
# OPD_CACHE: where models and prompts are kept (default ~/.cache/opd). OPD_PYTHON: the Python that .venv is made with.

OPD_CACHE ?= $(HOME)/.cache/opd
OPD_PYTHON ?=
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?= --rounds 1
export OPD_CACHE OPD_PYTHON

PYTHON := .venv/bin/python
PRUNED := $(OPD_CACHE)/smollm2-135m-pruned
teacher ?= $(OPD_CACHE)/smollm2-135m
comma := ,
DEMO_TASKS := coin_flip+lcm
DEMO_MODELS := --teacher "$(teacher)" --student "$(PRUNED)" \
	--data "$(OPD_CACHE)/reasoning-gym-$(DEMO_TASKS)-512/prompts.jsonl,prompt=question"
SCHEMA := $(PYTHON) tools/generate.py

.PHONY: demo demo-models test test-slow lint golden schema check-schema bench setup clean

demo: demo-models
	$(PYTHON) -m opd distill recipes/demo-cpu.yaml $(DEMO_MODELS) $(DEMO_ARGS)

# The student is not made again when the teacher is older: a folder is there as a whole or not at all.
demo-models: setup
	$(PYTHON) tools/fetch_models.py smollm2-135m reasoning-gym --tasks $(subst +,$(comma),$(DEMO_TASKS)) --rows 512
	test -d "$(PRUNED)" || $(PYTHON) tools/prune_layers.py "$(OPD_CACHE)/smollm2-135m" "$(PRUNED)" --layers 12,14,16,18

test: setup
	$(PYTHON) tools/fetch_models.py smollm2-135m humaneval
	$(PYTHON) -m pytest $(TEST_ARGS)

test-slow: setup
	$(PYTHON) tools/fetch_models.py smollm2-135m humaneval
	$(PYTHON) -m pytest -m slow $(TEST_ARGS)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

golden: setup
	$(PYTHON) tests/golden.py tests/golden/*.json

schema: setup
	$(SCHEMA)

check-schema: setup
	$(SCHEMA) --check

bench: demo-models
	python3 tools/setup.py --bench
	$(PYTHON) bench/step.py recipes/demo-cpu.yaml $(DEMO_MODELS)
	$(PYTHON) bench/versus_trl.py $(DEMO_MODELS) $(BENCH_ARGS)
	$(PYTHON) bench/teacher.py "$(OPD_CACHE)/smollm2-135m"

setup:
	@python3 tools/setup.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
