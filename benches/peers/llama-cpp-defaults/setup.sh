#!/usr/bin/env bash
# The same tools as llama-cpp's.
set -euo pipefail
peer=llama-cpp-defaults
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
"$(dirname "${BASH_SOURCE[0]}")/../llama-cpp/setup.sh"
mkdir -p "$home"
ready "as llama-cpp"
