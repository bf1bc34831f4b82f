# Every command of the project. They share one environment, .venv, made by the first that needs it.
PY := .venv/bin/python
STAMP := .venv/.installed
VLLM_STAMP := .cache/venvs/vllm/.installed
OPENVINO_STAMP := .cache/venvs/openvino/.installed
LLAMA_CPP_STAMP := .cache/venvs/llama_cpp/.installed
EMBEDDED := embedded:smollm2-135m-instruct
DRAFT_LM := runs/heads/draft_lm/outcome.json
HEADS_DATA := runs/heads/data/manifest.json
# An option of a command, where make was given the variable; one in the environment may be meant for others.
given = $(if $(findstring command line,$(origin $(1))), --$(2) "$($(1))")

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-serve test check mutants slow models device-check gpu-check bench serve-check tables clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## make .venv with the pinned packages; nothing to do when it is up to date

# Depends on the pins, so that a pulled change of them is installed by the next command that is run.
$(STAMP): pyproject.toml constraints.txt scripts/setup.sh scripts/cpu_torch.sh
	sh scripts/setup.sh
	@touch $@

demo: setup ## a draft for the embedded model, or for yours: TARGET=... [PROMPTS=file] [BUDGET=2h]; data, training, report, gate, export
	.venv/bin/draftsmith run $(if $(call given,TARGET),"$(TARGET)",$(EMBEDDED) --output runs/demo) --budget $(if $(call given,BUDGET),"$(BUDGET)",15m) --yes$(call given,PROMPTS,prompts)

demo-serve: demo $(VLLM_STAMP) ## vLLM serves the demo's target, plainly, with its draft, and with suffix lookup: the speeds, and acceptance by vLLM's own metrics
	.venv/bin/draftsmith check runs/demo/export/vllm --engine vllm --prompts runs/demo/data/held_out.jsonl --out runs/demo/serve
	.venv/bin/draftsmith check runs/demo/export/suffix_lookup --engine vllm --prompts runs/demo/data/held_out.jsonl --out runs/demo/serve_lookup

test: setup ## the test suite
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: setup ## format, lint, types, import contract, lines and modules against their limits
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) -m scripts.bench.count_house

mutants: setup ## plant each bug of tests/mutants.yaml by itself and run the test that is to find it (half an hour)
	$(PY) -m scripts.bench.mutants

slow: setup ## what the suite leaves out: engines in processes, compilers, killed and damaged runs, 100,000 samples of every rule (an hour)
	$(PY) -m pytest -m "(slow or soak) and not engine" -s

models: setup ## a tiny model of every family of transformers through every stage, into docs/results/models.json and docs/models.md (12 minutes)
	MODELS_RESULTS=docs/results/models.json $(PY) -m pytest -n auto -m models tests/models
	$(PY) -m scripts.bench.tables

device-check: setup ## decoding, evaluation, export and training on a mock device that is not the CPU: the CPU's results, waits counted (three minutes)
	$(PY) -m pytest -m device tests/device

gpu-check: setup ## this machine's GPU: its tokens, losses and artifacts beside the CPU's, then its speed, into runs/gpu_check/gpu-check.json (ten minutes)
	$(PY) -m pytest -m gpu tests/gpu
	$(PY) -m scripts.bench.gpu

bench: setup $(DRAFT_LM) ## NAME=decode (beside transformers), distill (beside TRL) or heads, into docs/results/NAME.json (trains what is not there)
	$(PY) -m scripts.bench.$(or $(NAME),decode)

tables: setup ## fill the documents' tables from docs/results/
	$(PY) -m scripts.bench.tables

serve-check: setup $(DRAFT_LM) $(VLLM_STAMP) $(LLAMA_CPP_STAMP) $(OPENVINO_STAMP) ## a vLLM server as writer and source of states; drafts in vLLM, llama.cpp and OpenVINO, into docs/results/serve.json (trains what is not there)
	$(PY) -m pytest -m engine -s
	$(PY) -m scripts.bench.serve --config scripts/bench/configs/serve/smollm2.yaml
	$(PY) -m scripts.bench.serve --config scripts/bench/configs/serve/bfloat16.yaml

$(VLLM_STAMP) $(OPENVINO_STAMP): .cache/venvs/%/.installed: scripts/setup_engine.sh scripts/cpu_torch.sh scripts/%_pins.txt
	sh scripts/setup_engine.sh $*
	@touch $@

# What benchmarks compare: prompts and answers of the embedded target, and a draft LM trained on them.
$(HEADS_DATA): | setup
	$(PY) scripts/data.py --config configs/data/heads.yaml

$(DRAFT_LM): $(HEADS_DATA)
	$(PY) train/distill.py --config configs/distill/draft_lm.yaml

$(LLAMA_CPP_STAMP): scripts/setup_llama_cpp.sh | setup
	sh scripts/setup_llama_cpp.sh
	@touch $@

clean: ## remove .venv and the tools' caches; runs/ and the downloads in .cache/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.cache/*' -prune -exec rm -rf {} +
