#!/usr/bin/env bash
# BigMoeOnEdge from the sources in BIGMOEONEDGE_SOURCE (github.com/Helldez/BigMoeOnEdge, with its submodule
# third_party/llama.cpp). Overlap needs the hook that the submodule's branch has: without it, reads and products take
# turns, which the adapter tells. Needs cmake and a C++ compiler; flags for cmake: PEERS_CMAKE_FLAGS.
set -euo pipefail
peer=bigmoeonedge
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/paths.sh"
source "$common/source.sh"
source_directory
if [[ ! -f $sources/third_party/llama.cpp/CMakeLists.txt ]]; then
    echo "$peer: no llama.cpp in $sources/third_party: git submodule update --init" >&2
    exit 1
fi
# shellcheck disable=SC2086 # flags are words
build_program "$here/generate.cpp" bmoe_core "$sources/third_party/llama.cpp/vendor" \
    -DLLAMA_OPENSSL=OFF -DBMOE_BUILD_TESTS=OFF -DBMOE_BUILD_CLI=OFF ${PEERS_CMAKE_FLAGS:-}
ready "$commit"
