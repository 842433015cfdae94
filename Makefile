# Two commands do everything on a fresh machine with Python >= 3.11: `make test` and `make demo`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint types unit docs test-slow demo dist dist-check audit clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --durations 10

# `make test` builds the pages too: tests/test_docs.py.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

# The demo needs a tenth of what the tests need. An environment that has everything will do too.
DEMO_STAMP := $(VENV)/.demo
$(DEMO_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $(DEMO_STAMP)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/secateur demo --out out/demo

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# What a release uploads. Nothing is downloaded: the build tools are in the environment.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# The wheel alone, in a new environment and an empty folder, must run the demo. This downloads torch.
FRESH := build/fresh
dist-check: dist
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)/venv
	$(FRESH)/venv/bin/python -m pip install --quiet "$$(echo dist/*.whl)[demo]"
	mkdir $(FRESH)/empty
	cd $(FRESH)/empty && ../venv/bin/python -c "import secateur; assert 'site-packages' in secateur.__file__, secateur.__file__"
	cd $(FRESH)/empty && ../venv/bin/secateur --version
	cd $(FRESH)/empty && ../venv/bin/secateur demo --out demo

# Look for dangerous code, and for known weaknesses of what we depend on. The second needs the network.
AUDIT := build/audit
audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet bandit pip-audit
	$(AUDIT)/bin/bandit --quiet --configfile pyproject.toml --recursive src
	$(AUDIT)/bin/pip-audit .

clean:
	rm -rf $(VENV) build dist site
