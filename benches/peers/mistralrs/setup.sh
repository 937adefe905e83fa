#!/usr/bin/env bash
# A wheel with mistral.rs (Rust, on candle) inside.
set -euo pipefail
peer=mistralrs
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
source "$common/venv.sh"
venv_install mistralrs==0.9.5
ready mistralrs==0.9.5
