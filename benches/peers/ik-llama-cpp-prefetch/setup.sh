#!/usr/bin/env bash
# ik_llama.cpp, newer than the wheel of ik-llama-cpp, from the sources in IK_LLAMA_CPP_SOURCE
# (github.com/ikawrakow/ik_llama.cpp). Needs cmake and a C++ compiler; flags for cmake: PEERS_CMAKE_FLAGS.
set -euo pipefail
peer=ik-llama-cpp-prefetch
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/paths.sh"
source "$common/source.sh"
source_directory
# shellcheck disable=SC2086 # flags are words
build_program "$here/generate.cpp" llama "$sources/vendor;$sources/common" \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF ${PEERS_CMAKE_FLAGS:-}
ready "$commit"
