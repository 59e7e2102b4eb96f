# Every target sets the environment up when it is missing: `git clone` and `make test` is all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Few tests wait, and each worker takes 20 s of a processor to collect them and to import torch and what belongs to it.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))')
INSTALLED := $(VENV)/.installed

# Where it is set, every worker and every process of a test compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check compiled test oldest launchers slow soak gpu gpu-figures bench demo grid docs clean

setup: $(INSTALLED)

# A new pip takes a third of the time of the one that Python 3.11 brings, which will do where there is
# no other. Modules are compiled when they are imported: to compile all modules of all packages takes
# longer than to install them.
# A new pip shows warnings of setuptools in spite of --quiet; they are left out.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoal needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	-$(BIN)/pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)
	@echo "installed: $(BIN)/shoal; its commands: $(BIN)/shoal --help; a whole swarm in three minutes: make demo"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

compiled: setup
	$(BIN)/pytest --collect-only -qq > /dev/null

test: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# With the oldest versions that pyproject.toml allows, in an environment of its own. That torch is another one than of
# all other tests, and on Linux the one for CUDA: gigabytes, unless PIP_EXTRA_INDEX_URL names that for CPUs.
oldest: setup
	test -d $(VENV)/oldest || $(PYTHON) -m venv $(VENV)/oldest
	$(BIN)/python -m tests.oldest > $(VENV)/oldest/constraints.txt
	PYTHONWARNINGS=ignore $(VENV)/oldest/bin/pip install --quiet --no-compile --constraint $(VENV)/oldest/constraints.txt --editable '.[dev]'
	$(VENV)/oldest/bin/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# With an environment of its own: SkyPilot, dstack and Modal bring hundreds of packages.
launchers:
	test -d $(VENV)/launchers || ($(PYTHON) -m venv $(VENV)/launchers && $(VENV)/launchers/bin/pip install --quiet skypilot dstack modal check-jsonschema)
	$(VENV)/launchers/bin/python -m tests.examples.engines

slow: setup
	$(BIN)/pytest -m slow

soak: setup
	$(BIN)/python -m tests.averaging.virtual.soak
	$(BIN)/pytest -m soak --timeout 0

# Those of seconds first: a GPU is often lent for minutes.
gpu: setup
	$(BIN)/pytest -m gpu -rs -s tests/peer tests

# First what was never measured; each prints when it is done, and what fails hides nothing else. The last line only asks for
# more turns; the two before it, losses of swarms in short cycles, take longest.
gpu-figures: setup
	-$(BIN)/python -m tests.benchmark.first_step --sequence 1024
	-$(BIN)/python -m tests.benchmark.device_steps --size 1B --device cuda --dtype bfloat16 --turns 1 --steps 48
	-$(BIN)/shoal run new --size 124m > $(VENV)/muon.toml
	-$(BIN)/python -m tests.benchmark.training $(VENV)/muon.toml --loops shoal --turns 1 --time 8s
	-$(BIN)/python -m tests.benchmark.training --size 1b --loops shoal --turns 1 --time 5s
	-$(BIN)/python -m tests.benchmark.training --size 124m --turns 1 --time 8s
	-$(BIN)/python -m tests.benchmark.device_steps --size 124M --device cuda --turns 2 --steps 48
	-$(BIN)/python -m tests.benchmark.device_steps --size 124M --device cuda --dtype bfloat16 --turns 2 --steps 48
	-$(BIN)/python -m examples.paper.quality.run --only "10 M" --seeds 1 --cycles 120 --workers 9 \
	  --set outer.momentum=0 --set outer.steps_per_cycle=8 --set outer.overlap_steps=2
	-$(BIN)/python -m examples.paper.quality.run --only "10 M" --seeds 1 --cycles 120 --workers 9 \
	  --set outer.momentum=0 --set outer.steps_per_cycle=8 --set outer.overlap_steps=2 --set peers.count=16
	-$(BIN)/python -m tests.benchmark.training --size 124m --turns 3

bench: setup
	$(BIN)/pytest -m bench --timeout 0 -s

# With an environment of its own: nothing else needs what builds the site. Open build/docs/index.html.
docs:
	test -x $(VENV)/docs/bin/mkdocs || ($(PYTHON) -m venv $(VENV)/docs && $(VENV)/docs/bin/pip install --quiet 'mkdocs-material>=9.6,<10')
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

demo: setup
	$(BIN)/shoal demo

# As root. Ten million parameters on lines a third as fast stand for 30 million on 50 to 5000 Mbit/s.
grid: setup
	for mbit in 17 67 333 1667; do for cycle in 8 32 128; do \
		$(BIN)/python -m tests.integration.wan quiet=75 --run examples/regions/run.toml \
			--public 4 --mbit $$mbit --cycle $$cycle --pace 0.4 || exit 1; \
	done; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
