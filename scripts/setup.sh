#!/bin/sh
# Makes .venv and installs the pinned packages into it: torch's CPU build where there is no GPU (nvidia-smi fails or is missing),
# else the build that pip chooses. `make setup` calls this when the pins have changed.
#
#   PYTHON           the interpreter to build on (default python3)
#   TORCH_INDEX_URL  where to take the CPU build from, in place of the machine's index and PyTorch's CPU index
#   ALLOW_CUDA=1     install the build of torch that pip chooses, GPU or not
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "draftsmith needs Python 3.11 or newer, and $PYTHON is not; name another: make setup PYTHON=python3.12" >&2
    exit 2
fi

pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@"
}

# An interrupted first call can leave a .venv without pip.
if ! pip --version >/dev/null 2>&1; then
    "$PYTHON" -m venv --clear .venv
fi

if [ -z "${ALLOW_CUDA:-}" ] && ! nvidia-smi >/dev/null 2>&1; then
    . scripts/cpu_torch.sh
    install_cpu_torch "$(grep '^torch==' constraints.txt)"
fi

pip install -c constraints.txt -e '.[dev]'
# speculators asks for older datasets and transformers than ours. The modules that tests load our exports with run with ours, and
# import these packages alone.
pip install --no-deps -c constraints.txt hs-connectors jiter loguru openai sniffio speculators
