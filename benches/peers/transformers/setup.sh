#!/usr/bin/env bash
# transformers and accelerate, which keep on disk what memory has no room for. PyTorch's wheel brings its GPU libraries
# along: several GiB.
set -euo pipefail
peer=transformers
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
requirements=(transformers==5.23.0 accelerate==1.15.0 torch==2.15.0 safetensors gguf==0.19.0 numpy)
venv_install "${requirements[@]}"
ready "${requirements[*]}"
