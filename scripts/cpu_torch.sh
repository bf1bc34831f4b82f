# Sourced by set-up, which defines `pip`: installs torch's CPU build, and ends with 2 where none can be had.
#
#   TORCH_INDEX_URL  where to take it from, in place of the machine's index and PyTorch's own
CPU_INDEX=https://download.pytorch.org/whl/cpu # the one that PyTorch's "Get started" page names

# install_cpu_torch PIN: by the exact pin `torch==VERSION`, and alone. A range, or another package's requirement, would let pip
# prefer a CUDA build, which brings several GB of nvidia-* packages. With the pin met, nothing installed afterwards touches torch.
install_cpu_torch() {
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        pip install --no-deps --index-url "$TORCH_INDEX_URL" "$1"
        return
    fi
    # By its label a CPU build is told from a CUDA build without fetching either. The machine's own index comes first.
    pip install --quiet --no-deps "$1+cpu" 2>/dev/null && return
    echo "No $1+cpu on this machine's package index; asking $CPU_INDEX"
    pip install --no-deps --index-url "$CPU_INDEX" "$1+cpu" && return
    # Some systems' builds, such as macOS's, are for CPUs and have no label.
    plan=$(pip install --quiet --dry-run --report - "$1")
    if printf '%s' "$plan" | grep -Eq '"name": "(nvidia|cuda)[-_]'; then
        echo "The package index has only a CUDA build of $1, several GB that need a GPU, and the CPU build could not be had from" \
            "$CPU_INDEX: set TORCH_INDEX_URL to a mirror of that index that can be reached" >&2
        exit 2
    fi
    pip install --no-deps "$1"
}
