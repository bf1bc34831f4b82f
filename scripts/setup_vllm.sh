#!/bin/sh
# Makes .cache/venvs/vllm, an environment of its own with vLLM for CPUs, from the pins in scripts/vllm_pins.txt: about 1 GB of
# downloads. `make serve-check` calls this. It stays apart from .venv, because vLLM wants another transformers.
#
#   PYTHON           the interpreter to build on (default python3): 3.11, which the pins were made with
#   TORCH_INDEX_URL  where to take torch from where pip would choose a CUDA build: the address of PyTorch's CPU index
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=.cache/venvs/vllm

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

"$PYTHON" -m venv --clear "$VENV"
# --no-deps everywhere: the pins are complete, and the requirements as they stand lead to CUDA builds.
pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' scripts/vllm_pins.txt)"
pip install --no-deps -r scripts/vllm_pins.txt
"$VENV/bin/python" - <<'END'
import sys
import torch

if torch.version.cuda:
    sys.exit(
        f"pip chose torch {torch.__version__}, a CUDA build, and vLLM for CPUs needs the CPU build: "
        "set TORCH_INDEX_URL to the address of PyTorch's CPU index (its 'Get started' page shows it)"
    )
END
