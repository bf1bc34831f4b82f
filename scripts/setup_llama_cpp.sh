#!/bin/sh
# Makes .cache/venvs/llama_cpp: llama.cpp's converter to GGUF (source/convert_hf_to_gguf.py, with what it needs beside this
# project's packages in python/), and bin/llama-server, compiled: five minutes on two cores. `make serve-check` calls this.
# The source is the one that the pinned llama-cpp-python brings along; that package itself is not installed.
#
#   PYTHON     the interpreter whose pip is used (default .venv/bin/python)
#   CONVERTER  set to anything: only the converter, without compiling the server
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PLACE=.cache/venvs/llama_cpp
VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e # of its source archive

pip() {
    "$PYTHON" -m pip --disable-pip-version-check "$@"
}

if [ -z "${CONVERTER:-}" ] && ! { command -v cmake && command -v c++; } >/dev/null; then
    echo "llama-server is compiled here: install cmake and a C++ compiler, or set CONVERTER=1 for the converter alone" >&2
    exit 2
fi
rm -rf "$PLACE"
mkdir -p "$PLACE/bin" "$PLACE/source"
# pip refuses an archive with another hash, before it runs anything of it.
echo "llama-cpp-python==$VERSION --hash=sha256:$SHA256" >"$PLACE/pins.txt"
pip download --no-deps --no-binary llama-cpp-python --require-hashes --dest "$PLACE" --requirement "$PLACE/pins.txt"
tar -xzf "$PLACE"/llama_cpp_python-*.tar.gz -C "$PLACE/source" --strip-components=3 "llama_cpp_python-$VERSION/vendor/llama.cpp"
rm "$PLACE"/llama_cpp_python-*.tar.gz
pip install --no-deps --target "$PLACE/python" sentencepiece==0.2.3
[ -z "${CONVERTER:-}" ] || exit 0
# Without the web page, which would be fetched, and without HTTPS.
cmake -S "$PLACE/source" -B "$PLACE/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
cmake --build "$PLACE/build" --target llama-server --parallel 2
cp "$PLACE/build/bin/llama-server" "$PLACE/bin/"
rm -rf "$PLACE/build"
