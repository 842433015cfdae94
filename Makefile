# Two commands do everything on a fresh machine with Python >= 3.11: `make test` and `make demo`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint types unit docs test-slow demo clean

test: lint types unit

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all,dev,peers]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	# One thread per process: more threads than cores make torch many times slower.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow" --durations 10

# `make test` builds the pages too: tests/test_docs.py.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

demo: $(STAMP)
	$(BIN)/secateur demo --out out/demo

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist site
