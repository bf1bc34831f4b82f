# Every command of the project. They share one environment, .venv, made by the first that needs it.
PY := .venv/bin/python
STAMP := .venv/.installed
VLLM_STAMP := .cache/venvs/vllm/.installed
OPENVINO_STAMP := .cache/venvs/openvino/.installed
LLAMA_CPP_STAMP := .cache/venvs/llama_cpp/.installed
EMBEDDED := embedded:smollm2-135m-instruct
DRAFT_LM := runs/heads/draft_lm/outcome.json
HEADS_DATA := runs/heads/data/manifest.json
GEMMA := .cache/gemma/gemma-3-270m-q4_k_m.gguf
# An option of a command, where make was given the variable; one in the environment may be meant for others.
given = $(if $(findstring command line,$(origin $(1))), --$(2) "$($(1))")

.DEFAULT_GOAL := help
.PHONY: help help-lab setup demo demo-serve demo-images demo-speech test check bench bench-decode bench-distill bench-heads bench-demo bench-eval bench-scale distribution-check device-check gpu-check slow-check cluster-check engine-check models-check soak tables serve-check gemma-check clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

help-lab: ## list the laboratory's: benchmarks, and checks of engines, models and devices
	@awk -F ':.*#lab ' '/^[a-z-]+:.*#lab / {printf "make %-18s %s\n", $$1, $$2}' Makefile

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

demo-images: setup ## pictures of digits: a target of image codes trained in minutes, strict and relaxed decoding side by side, gate
	$(PY) scripts/lab/modalities/demo.py images

demo-speech: setup ## likewise words, of your recordings: WAVS=folder of WAV files named WORD_....wav
	$(PY) scripts/lab/modalities/demo.py speech$(call given,WAVS,wavs)

test: setup ## the test suite
	$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: setup ## format, lint, types, import contract
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: bench-demo bench-heads bench-decode bench-distill bench-eval bench-scale #lab every side-by-side measurement (after make demo; hours)

bench-decode: setup $(DRAFT_LM) #lab the decoder against transformers' assisted generation, into docs/results/decode.json (trains what is not there)
	$(PY) scripts/lab/benchmark.py decode

bench-distill: setup $(DRAFT_LM) #lab the loss and the training against plain ways and TRL, tau before and after, into docs/results/distill.json
	$(PY) scripts/lab/benchmark.py distill

bench-heads: setup #lab Hydra and EAGLE-3 trained on prompts of many kinds and measured, into docs/results/heads.json (a night)
	$(PY) scripts/lab/benchmark.py heads

bench-demo: setup #lab the figures of the demo's reports, into docs/results/demo.json (after make demo)
	$(PY) scripts/lab/benchmark.py demo

bench-eval: setup $(DRAFT_LM) #lab predicted speed against measured, the evaluator's own cost, into docs/results/eval.json
	$(PY) scripts/lab/benchmark.py eval

bench-scale: setup #lab two processes beside one, padding, checkpoints, waiting for data, into docs/results/scale.json (after bench-decode)
	$(PY) scripts/lab/benchmark.py scale

distribution-check: setup #lab 100,000 samples of the whole decoder for every rule and shape against the target's exact distribution (minutes)
	$(PY) -m pytest -m slow -s tests/eval/decoder/test_output_distribution.py

slow-check: setup #lab a forward, attention and a loss compiled by the real compiler, runs by the installed wheel, killed and out of disk (ten minutes)
	$(PY) -m pytest -m slow -s tests/heads/inference/test_compiled_forward.py tests/heads/modules/test_attention.py tests/scripts/lab/counts/test_traffic.py tests/test_wheel.py tests/faults/test_whole_run.py

cluster-check: setup #lab the job files of scripts/cluster, with a process or a node killed and stand-ins for Slurm (minutes)
	$(PY) -m pytest -m 'slow or not slow' -s tests/faults/test_cluster.py tests/faults/test_elastic.py

device-check: setup #lab decoding, evaluation, export and training on a mock device that is not the CPU: the CPU's results, waits counted (three minutes)
	$(PY) -m pytest -m device tests/device

gpu-check: setup #lab this machine's GPU: its tokens, losses and artifacts beside the CPU's, its speed and memory, into runs/gpu_check/gpu-check.md (ten minutes)
	$(PY) scripts/lab/benchmark.py gpu

engine-check: setup #lab DDP, FSDP2, ZeRO-2 and 3, offloading and split targets in processes on the CPU against one (about 15 minutes)
	$(PY) -m pytest -m slow -s tests/train/loop/test_engines.py tests/train/loop/test_overlap.py tests/train/test_split_target.py
	$(PY) scripts/lab/benchmark.py engines

models-check: setup #lab a tiny model of every family of transformers through every stage, into docs/results/models.json and docs/models.md (12 minutes)
	$(PY) scripts/lab/benchmark.py models

soak: setup #lab 210 tiny runs killed, stopped and damaged at random, each to end with an undisturbed run's weights (about 15 minutes)
	$(PY) scripts/lab/benchmark.py soak

tables: setup #lab fill the documents' tables from docs/results/
	$(PY) scripts/lab/benchmark.py tables

serve-check: setup $(DRAFT_LM) $(VLLM_STAMP) $(LLAMA_CPP_STAMP) $(OPENVINO_STAMP) #lab a vLLM server as writer and source of hidden states; drafts in vLLM, transformers, llama.cpp, OpenVINO, into docs/results/serve.json (trains what is not there)
	$(PY) -m pytest -m slow -s tests/distill/server/test_served_answers.py tests/distill/server/test_served_states.py
	$(PY) scripts/lab/benchmark.py serve --config scripts/lab/configs/serve/smollm2.yaml
	$(PY) scripts/lab/benchmark.py serve --config scripts/lab/configs/serve/bfloat16.yaml

$(VLLM_STAMP) $(OPENVINO_STAMP): .cache/venvs/%/.installed: scripts/setup_engine.sh scripts/cpu_torch.sh scripts/%_pins.txt
	sh scripts/setup_engine.sh $*
	@touch $@

# What the laboratory compares: prompts and answers of the embedded target, and a draft LM trained on them.
$(HEADS_DATA): | setup
	$(PY) scripts/data.py --config configs/data/heads.yaml

$(DRAFT_LM): $(HEADS_DATA)
	$(PY) train/distill.py --config configs/distill/draft_lm.yaml

$(LLAMA_CPP_STAMP): scripts/setup_llama_cpp.sh | setup
	sh scripts/setup_llama_cpp.sh
	@touch $@

gemma-check: setup $(GEMMA) #lab every head family on Gemma-3-270m, a vocabulary of 262k (once 240 MB of downloads, then minutes)
	$(PY) -m pytest -m slow -s tests/train/test_gemma_270m.py

$(GEMMA): scripts/fetch_gemma.sh | setup
	sh scripts/fetch_gemma.sh

clean: ## remove .venv and the tools' caches; runs/ and the downloads in .cache/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.cache/*' -prune -exec rm -rf {} +
