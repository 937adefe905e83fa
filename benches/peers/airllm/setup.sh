#!/usr/bin/env bash
# AirLLM, in the environment of transformers, on which it is built.
set -euo pipefail
peer=airllm
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
"$(dirname "${BASH_SOURCE[0]}")/../transformers/setup.sh"
mkdir -p "$home"
ln -sfn ../transformers/venv "$home/venv"
source "$common/venv.sh"
venv_install airllm==4.0.0
ready airllm==4.0.0
