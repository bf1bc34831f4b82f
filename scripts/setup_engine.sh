#!/bin/sh
# Makes .cache/venvs/ENGINE, an environment of its own with an engine for CPUs, from the pins in scripts/ENGINE_pins.txt: vllm (about
# 1 GB of downloads) or openvino (half of it). `make serve-check` calls this. They stay apart from .venv, because they want
# another transformers.
#
#   PYTHON           the interpreter to build on (default python3): 3.11, which the pins were made with
#   TORCH_INDEX_URL  where to take torch from where pip would choose a CUDA build: the address of PyTorch's CPU index
set -eu
cd "$(dirname "$0")/.."
ENGINE=${1:-}
if [ ! -f "scripts/${ENGINE}_pins.txt" ]; then
    echo "usage: sh scripts/setup_engine.sh vllm|openvino" >&2
    exit 2
fi
PINS=scripts/${ENGINE}_pins.txt
PYTHON=${PYTHON:-python3}
VENV=.cache/venvs/$ENGINE

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

"$PYTHON" -m venv --clear "$VENV"
# --no-deps everywhere: the pins are complete, and the requirements as they stand lead to CUDA builds.
pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' "$PINS")"
pip install --no-deps -r "$PINS"
"$VENV/bin/python" - <<'END'
import sys
import torch

if torch.version.cuda:
    sys.exit(
        f"pip chose torch {torch.__version__}, a CUDA build, and engines for CPUs need the CPU build: "
        "set TORCH_INDEX_URL to the address of PyTorch's CPU index (its 'Get started' page shows it)"
    )
END
