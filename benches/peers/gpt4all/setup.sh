#!/usr/bin/env bash
# A wheel with a llama.cpp of 2024 inside.
set -euo pipefail
peer=gpt4all
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
venv_install gpt4all==2.8.2
ready gpt4all==2.8.2
