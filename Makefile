# Everything a developer or a CI machine runs. Needs git, make and python3 (3.11 or newer).
#
#   make demo      install into .venv, predict Llama-3-70B on 64 H100, write a timeline
#   make test      the test suite                 make lint   ruff, pyright, import-linter
#   make docs      the documentation, strictly    make bench  speed against its budgets
#   make validate  predictions against measured runs (../shared), docs/accuracy.md
#   make accuracy-change  which predictions of a fixed sample moved, error before and after
#   make check     lint + docs                    make clean  remove what make made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
JOBS ?= 2

DEMO_RUN := examples/llama3-70b-64xh100.yaml
DEMO_TRACE := demo.trace.json.gz
MEASURED_RUNS := ../shared/data/runs/measured_runs.csv.gz
SAMPLE := tests/validation/sample_runs

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench validate accuracy-change check clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(CORE)
	@$(BIN)/foretrain predict $(DEMO_RUN) --trace $(DEMO_TRACE)
	@echo
	@echo "Timeline: $(CURDIR)/$(DEMO_TRACE) (open it in ui.perfetto.dev or chrome://tracing)"

test: $(DEV)
	$(BIN)/pytest -n $(JOBS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)
	$(BIN)/mkdocs build --strict --quiet

bench: $(DEV)
	$(BIN)/python benchmarks/bench_operators.py
	$(BIN)/python benchmarks/bench_collectives.py
	$(BIN)/python benchmarks/bench_predict.py

validate: $(DEV)
	@test -e $(MEASURED_RUNS) || { echo "make validate needs $(MEASURED_RUNS)"; exit 1; }
	$(BIN)/foretrain validate runs $(MEASURED_RUNS) --workers $(JOBS) --report docs/accuracy.md
	$(BIN)/foretrain validate runs $(MEASURED_RUNS) --workers $(JOBS) --ids $(SAMPLE).txt \
	  --write-baseline $(SAMPLE)_baseline.json
	$(BIN)/pytest tests/validation -m validation -rA -n $(JOBS)

accuracy-change: $(DEV)
	@test -e $(MEASURED_RUNS) || { echo "make accuracy-change needs $(MEASURED_RUNS)"; exit 1; }
	$(BIN)/foretrain validate runs $(MEASURED_RUNS) --workers $(JOBS) --ids $(SAMPLE).txt \
	  --baseline $(SAMPLE)_baseline.json

check: lint docs

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache $(DEMO_TRACE)

# ---------------------------------------------------------------------------------------------
# The environment. The stamps make a second call cheap and a changed pin effective.

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there; foretrain needs Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "foretrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "$(PYTHON) cannot create virtual environments (the module ensurepip is missing)."; \
	  echo "On Debian and Ubuntu: apt-get install python$$v-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml requirements/core.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/core.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements/ci.txt $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/ci.txt
	@touch $@
