#!/bin/bash
# On the machine with the GPU: trains for MINUTES (of the whole schedule) and leaves the weights in parts of at most
# 15 MiB, and train.log, in OUTDIR. Called again with the same arguments while RUN (default /tmp/fine-run) is still
# there, it goes on where it stopped. LIMIT_S: stop and save after this many seconds of the call (default 560).
# MAX_STEPS: maximum steps (for a test). More arguments go to train.py.
set -u
start=$(date +%s)
out=$(mkdir -p "$1" && cd "$1" && pwd)
minutes=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
scripts=$here
[ -d "$here/fine-model" ] && scripts=$here/fine-model
data=${DATA:-$here/data}
run=${RUN:-/tmp/fine-run}
mkdir -p "$run"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
args=(--data "$data" --out "$run" --parts "$out" --minutes "$minutes" --stop-at $((start + ${LIMIT_S:-560})) --resume)
[ -n "${MAX_STEPS:-}" ] && args+=(--steps "$MAX_STEPS")
${PYTHON:-python3} "$scripts/train.py" "${args[@]}" "$@"
rc=$?
cp "$run/train.log" "$out/train.log"
ls -l "$out"
exit $rc
