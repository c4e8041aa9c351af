PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
SIMULATE := $(BIN)/gradweave simulate

.PHONY: demo test lint pictures figures clean

# The main job, at a size that ends within two minutes, and the schedules.
demo: $(VENV)/ready
	@mkdir -p $(DEMO)
	$(BIN)/gradweave compare --out $(DEMO)/compare
	$(SIMULATE) single --out $(DEMO)/single.png
	$(SIMULATE) data-parallel --out $(DEMO)/data-parallel.png
	$(SIMULATE) pipeline --out $(DEMO)/pipeline.png
	$(SIMULATE) daso --out $(DEMO)/daso.png

# One thread each, and one process more than there are cores: many tests wait for other processes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $$(($$(nproc) + 1)) --dist loadgroup -m "not slow"

lint: $(VENV)/ready
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

# The pictures that README and docs show.
pictures: $(VENV)/ready
	$(SIMULATE) pipeline --policy one_f_one_b,modulo --stages 4 --layers 16 --microbatches 4 --out docs/images/pipeline.png
	$(SIMULATE) single --policy in_order,cross_step --network mobilenet_v3_large --steps 1 --out docs/images/single.png
	$(SIMULATE) data-parallel --policy ddp,reverse_first_k --bucket-bytes 0 --steps 2 --out docs/images/data-parallel.png
	$(SIMULATE) daso --wait 2 --steps 8 --out docs/images/daso.png

# The tables of README, docs and benchmarks/README.md, from benchmarks/results.
figures:
	$(PYTHON) benchmarks/figures.py

$(VENV)/ready: pyproject.toml constraints.txt tools/make_env.sh
	tools/make_env.sh $(PYTHON) $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
