#!/usr/bin/env bash
# The same program as bigmoeonedge's.
set -euo pipefail
peer=bigmoeonedge-approximate
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"
"$(dirname "${BASH_SOURCE[0]}")/../bigmoeonedge/setup.sh"
mkdir -p "$home"
ready "as bigmoeonedge"
