#!/usr/bin/env bash
# Ten minutes with a GPU: whether hobbit is exact there, and how fast it is beside llama.cpp. Needs bash, Python 3, and
# programs that contrib/cuda.sh built (CHECK=1).
#
#   benches/gpu/check.sh [DIRECTORY] [OPTIONS]    the programs' directory [default: target/release]; --help lists more
#   benches/gpu/check.sh --build [OPTIONS]        builds them first, in target/cuda: more than an hour, 4 GiB
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [[ ${1:-} == --build ]]; then
  shift
  CHECK=1 "$here/../../contrib/cuda.sh" "$here/../../target/cuda"
  set -- "$here/../../target/cuda/check/target/release" "$@"
fi
exec python3 "$here/check.py" "$@"
