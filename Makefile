# Every command of the project. They share one environment, .venv, made by the first that needs it.
PY := .venv/bin/python
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench bench-decode bench-distill tables clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## make .venv with the pinned packages; nothing to do when it is up to date

# Depends on the pins, so that a pulled change of them is installed by the next command that is run.
$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	sh scripts/setup.sh
	@touch $@

demo: setup ## the whole loop on the embedded model: data, distil, decode, report, gate
	$(PY) scripts/demo.py

test: setup ## the test suite
	$(PY) -m pytest

check: setup ## format, lint, types, import contract
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: bench-decode bench-distill ## every side-by-side measurement

bench-decode: setup ## the decoder against transformers' assisted generation, into docs/results/decode.json
	$(PY) scripts/bench_decode.py

bench-distill: setup ## the loss and the training against plain ways and TRL, tau before and after, into docs/results/distill.json
	$(PY) scripts/bench_distill.py

tables: setup ## fill the README's tables from docs/results/
	$(PY) scripts/results_table.py

clean: ## remove .venv and the tools' caches; runs/ and the downloads in .cache/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.cache/*' -prune -exec rm -rf {} +
