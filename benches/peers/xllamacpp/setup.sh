#!/usr/bin/env bash
# A wheel with llama.cpp's server inside.
set -euo pipefail
peer=xllamacpp
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
venv_install xllamacpp==2026.10.11549
ready xllamacpp==2026.10.11549
