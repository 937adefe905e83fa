#!/usr/bin/env bash
# A source package that builds the llama.cpp inside it, for this processor.
set -euo pipefail
peer=llama-cpp-python
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
# Without the parts for images, which it builds but does not need here.
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF ${CMAKE_ARGS:-}"
export CMAKE_BUILD_PARALLEL_LEVEL=${PEERS_JOBS:-$(nproc)}
pip_flags=--no-binary=llama-cpp-python
venv_install llama-cpp-python==0.3.36
ready llama-cpp-python==0.3.36
