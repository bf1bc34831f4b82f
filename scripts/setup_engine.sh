#!/bin/sh
# Makes .cache/venvs/ENGINE, an environment of its own with an engine for CPUs, from the pins in scripts/ENGINE_pins.txt: vllm (about
# 1 GB of downloads) or openvino (half of it). `make serve-check` calls this. They stay apart from .venv, because they want
# another transformers.
#
#   PYTHON           the interpreter to build on (default python3): 3.11, which the pins were made with
#   TORCH_INDEX_URL  where to take torch's CPU build from, in place of the machine's index and PyTorch's CPU index
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
. scripts/cpu_torch.sh
install_cpu_torch "$(grep '^torch==' "$PINS")"
pip install --no-deps -r "$PINS"
