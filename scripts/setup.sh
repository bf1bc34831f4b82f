#!/bin/sh
# Makes .venv and installs the pinned packages into it. `make setup` calls this when the pins have changed.
#
#   PYTHON           the interpreter to build on (default python3)
#   TORCH_INDEX_URL  where to take torch from on a machine without a GPU: the address of PyTorch's CPU index
#   ALLOW_CUDA=1     install whatever build of torch pip chooses, GPU or not
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

# Without a GPU, torch is installed first and alone, by the exact pin. A range, or another package's requirement, would let
# pip prefer a CUDA build, which brings several GB of nvidia-* packages that such a machine cannot use. With the pin met,
# nothing that is installed afterwards touches torch. Where even the pin leads to a CUDA build, stop before it is fetched.
if ! command -v nvidia-smi >/dev/null 2>&1; then
    torch=$(grep '^torch==' constraints.txt)
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        pip install --index-url "$TORCH_INDEX_URL" "$torch"
    else
        plan=$(pip install --quiet --dry-run --report - "$torch")
        if [ -z "${ALLOW_CUDA:-}" ] && printf '%s' "$plan" | grep -Eq '"name": "(nvidia|cuda)-'; then
            echo "There is no GPU here (no nvidia-smi), but pip would install the CUDA build of $torch, several GB." >&2
            echo "Set TORCH_INDEX_URL to the address of PyTorch's CPU index (its 'Get started' page shows it), or ALLOW_CUDA=1." >&2
            exit 2
        fi
        pip install "$torch"
    fi
fi

pip install -c constraints.txt -e '.[dev]'
