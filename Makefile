# `make study` is the main job, `make test` passes everything; all targets need only Python 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: study test test-quick test-gpu soak lint docs wheel clean

# of `make soak`: how many drills of each kind (empty: as many as each says itself), and what draws them
COUNT ?=
SEED ?= 0

study: $(INSTALLED)
	$(BIN)/manyhands study default

# four tests at a time, because many of them wait for processes, but for those that compare times (ALONE in
# tests/conftest.py)
test: lint
	$(BIN)/python -m pytest -m "not alone" --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 10
	$(BIN)/python -m pytest -m alone --durations 10

test-quick: lint
	$(BIN)/python -m pytest -m "not slow"

# parity, resume, faults and speed of every strategy, for whoever has GPUs
test-gpu: $(INSTALLED)
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/python -m pytest tests/gpu -m gpu --capture=no; \
	else echo "no CUDA device here: nothing to test"; fi

# long randomized drills, what `make test` leaves out of its large matrices, and ten times as many examples
soak: $(INSTALLED)
	$(BIN)/python -m pytest soak --timeout 3600 --seed $(SEED) $(if $(COUNT),--count $(COUNT))
	$(BIN)/python -m pytest tests -m soak
	MANYHANDS_EXAMPLES=10 $(BIN)/python -m pytest tests -m "hypothesis and not alone" --numprocesses 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	for folder in benchmarks/*/; do $(BIN)/mypy $$folder || exit 1; done
	$(BIN)/lint-imports

# the documentation as a site that works from the disk: open site/index.html
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# pip, not uv: it finds the CPU build of torch; the range keeps gigabytes of CUDA away.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'manyhands needs Python 3.11 or newer: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[mpi,tracking,dev]"
	touch $@

clean:
	rm -rf .venv runs results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist site
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
