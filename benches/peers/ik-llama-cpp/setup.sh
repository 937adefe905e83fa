#!/usr/bin/env bash
# A wheel with ik_llama.cpp, a fork with kernels of its own, inside.
set -euo pipefail
peer=ik-llama-cpp
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
venv_install ik-llama-cpp-python==0.1.5
ready ik-llama-cpp-python==0.1.5
