#!/usr/bin/env bash
# Measures hobbit's claims: hobbit, the llama.cpp that is linked into it and other programs, under the same limits.
#
# usage: benches/prove.sh [STUDY...]     as root, for the control groups; without a name, all of them: about three hours
#   papers      [input, output] = [16,32] [16,128] [128,32] [128,128] on four shapes of models
#   curve       decode speed from the smallest budget that works to everything in memory
#   ablation    what dynamic precision, prefetching and the policy add
#   context     decode speed behind longer and longer contexts
#   experts     models of the same size whose experts are more and smaller
#   resident    no limit, everything in memory: what hobbit costs
#   fits        the whole command with budgets from 30 to 130 % of the model: 12 tokens and 32 more
#   contended   with one other busy process, and without
#   startup     from the start of the process to the first token
#   long        2,000 tokens in the least memory, alone and with another process that takes memory
#   peers       other programs: benches/peers/setup.sh installs them (and llama.cpp, which fits needs too)
#   efficiency  reading while multiplying: shares of the experts in memory, slower disks, with and without looking ahead
#   own-ground  the papers' systems and their baselines, emulated (own_ground.toml): only by its name, two hours
#   routes      only by its name: the shape of Qwen3-30B-A3B on a real model's recorded routes, a trace that $ROUTES
#               names (made by hobbit-cli --trace or hobbit-sim import); $ROUTES_TOPK experts a token (default: 6)
# then
#   report      tables and pictures, from the raw files alone (Python with requirements.txt)
#
# Raw results go to $RESULTS (default: benches/results/<machine>/prove), models to $MODELS (default: target/prove, 20
# GiB). llama.cpp gets as many threads as it is fastest with in a short run in the same memory: the cores, or twice as
# many, since those that wait for a page fault need none.
# The disk's read-ahead is $READ_AHEAD_KIB while it runs: 128, which Linux has by default; llama.cpp depends on it. 0
# leaves it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
bin=${BIN:-$root/target/release}
models=$(realpath -m "${MODELS:-$root/target/prove}")
peers=$(realpath -m "${PEERS:-$here/peers}")
cd "$root"

cores=$(nproc)
prose=$root/models/demo-heldout-prose.txt
code=$root/models/demo-heldout-code.txt

[[ -n ${BIN:-} ]] || cargo build --release --bin hobbit-bench --bin hobbit-cli --bin gguf-tools -p hobbit-programs -p gguf-tools
export BIN=$bin
# Every run begins with empty caches.
export HOBBIT_ARG_CACHE_STATE=off
driver=$here/study.py
mkdir -p "$models"
results=$(realpath -m "${RESULTS:-$here/results/$("$driver" machine "$models")/prove}")
mkdir -p "$results"
# Records name the commit that was built.
[[ -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || echo "note: what is built here may not be what is committed" >&2

read_ahead=${READ_AHEAD_KIB:-128}
queue=/sys/dev/block/$(stat -c '%Hd:%Ld' "$models")
queue=$(realpath "$queue")
[[ -d $queue/queue ]] || queue=$(dirname "$queue")
queue=$queue/queue/read_ahead_kb
if [[ $read_ahead != 0 && -w $queue ]]; then
    before=$(cat "$queue")
    trap 'echo "$before" > "$queue"' EXIT
    echo "$read_ahead" > "$queue"
fi

# model NAME SYNTH-FLAGS...: generates it unless it is there.
model() {
    local name=$1
    shift
    [[ -s $models/$name.gguf ]] || "$bin/gguf-tools" synth "$models/$name.gguf" "$@"
}

shapes() {
    model mixtral --preset mixtral-bench --layers 8
    model phimoe --preset phimoe-bench --layers 8
    model qwen3moe --preset qwen3moe-bench --layers 8
    model deepseek --preset deepseek-bench --layers 6
}

# The demo model with larger experts that compute the same: routed as it was trained to be.
trained() {
    [[ -s $models/demo-wide.gguf ]] || gguf-tools/demo-model/widen.py models/demo.gguf 8192 "$models/demo-wide.gguf"
}

# run STUDY FLAGS...: appends the records, in which models have names and no paths.
run() {
    local study=$1
    shift
    (cd "$models" && "$bin/hobbit-bench" --label "$study" --progress -o jsonl "$@") >> "$results/$study.jsonl"
}

# fastest FLAGS...: the threads, the cores or twice as many, with which llama.cpp is faster in a short run.
fastest() {
    (cd "$models" && "$bin/hobbit-bench" "$@" --baseline-only -t "$cores,$((2 * cores))" -d 64 -p 0 -n 0 -pg 32,8 -r 1 \
        -o jsonl) |
        python3 -c 'import json, sys; print(max(map(json.loads, sys.stdin), key=lambda o: o["avg_ts"])["n_threads"])'
}

# compare STUDY MODEL LIMIT FLAGS...: runs a model on prose beside llama.cpp, in that memory ('' for no limit).
compare() {
    local study=$1 place=(-m "$2.gguf" --prompt-file "$prose" ${3:+--limit "$3"})
    shift 3
    run "$study" "${place[@]}" -t "$cores" --baseline --baseline-threads "$(fastest "${place[@]}")" "$@"
}

# limited STUDY LIMITS... -- FLAGS...: the same with limits of study.py: other processes, or a slower disk.
limited() {
    local study=$1
    shift
    (cd "$models" && "$driver" bench --label "$study" "$@") >> "$results/$study.jsonl"
}

begin() {
    echo "== $1" >&2
    rm -f "$results/$1.jsonl"
}

papers() {
    begin papers
    shapes
    for name in mixtral phimoe qwen3moe deepseek; do
        compare papers "$name" 1.25GiB --order AB -p 0 -n 0 -pg 16,32 -pg 16,128 -pg 128,32 -pg 128,128 -r 1
    done
}

curve() {
    begin curve
    shapes
    for name in mixtral qwen3moe; do
        for limit in 500MiB 750MiB 1GiB 1.5GiB 2GiB 3.25GiB; do
            compare curve "$name" "$limit" --order AB -d 64 -p 0 -n 32 -r 1
        done
    done
}

ablation() {
    begin ablation
    shapes
    local variants=(
        'LRU=--policy lru'
        'LRU, without overlap=--policy lru --no-overlap'
        'foresight=--policy learned'
        'foresight, prefetch=--policy learned --predictor stacked-gate'
        'LRU, dynamic=--policy lru --low q2_k'
        'foresight, dynamic=--policy learned --low q2_k'
        'foresight, dynamic, prefetch=--policy learned --low q2_k --predictor stacked-gate'
    )
    for name in mixtral qwen3moe; do
        # Made once, outside of the limit.
        "$bin/hobbit-cli" -m "$models/$name.gguf" --low q2_k -p a -n 1 --quiet > "$models/low.log"
        # There and back: what the disk does meanwhile meets all of them.
        for at in 0 1 2 3 4 5 6 6 5 4 3 2 1 0; do
            # shellcheck disable=SC2086
            run ablation -m "$name.gguf" --prompt-file "$prose" --limit 1.25GiB -t "$cores" -d 128 -p 0 -n 64 -r 1 \
                --variant "${variants[at]%%=*}" ${variants[at]#*=}
        done
    done
}

context() {
    begin context
    shapes
    # As many threads for both: behind 512 tokens and more, logits depend on their number in the last bits.
    run context -m "qwen3moe.gguf" --prompt-file "$code" --limit 1.25GiB -t "$cores" --baseline --order AB -p 0 -n 16 -d 0,512,1024,2048,4096 -r 1
}

experts() {
    begin experts
    for n in 16 32 64 128; do
        model "experts-$n" --preset qwen3moe-bench --layers 4 --experts "$n" --topk $((n / 8)) --ff $((49152 / n))
        compare experts "experts-$n" 750MiB -d 64 -p 0 -n 32 -r 1
    done
}

resident() {
    begin resident
    shapes
    for name in mixtral qwen3moe; do
        compare resident "$name" '' --expert-cache 100% -p 128 -n 64 -r 3
    done
}

# hobbit-cli as its users start it, and llama.cpp as it is by default: repacked weights are copies, for which there must
# be room.
fits() {
    begin fits
    shapes
    head -c 17 "$prose" > "$models/twelve.txt" # twelve tokens where there are no words
    local name percent size
    for name in mixtral qwen3moe; do
        local whole=(peers --label fits -m "$name.gguf" --prompt-file twelve.txt -n 32 --warm -t "$cores")
        size=$(stat -L -c %s "$models/$name.gguf")
        for percent in 30 45 60 75 90 100 110 130; do
            local stock=llama-cpp
            [[ $percent -le 100 ]] || stock=llama-cpp-defaults
            (cd "$models" && "$driver" "${whole[@]}" --limit $((size / 100 * percent)) --baseline "$peers/$stock") \
                >> "$results/fits.jsonl"
        done
        # A whole command of a second differs by a tenth from one run to the next.
        for _ in 1 2 3 4 5; do
            (cd "$models" && "$driver" "${whole[@]}" --baseline "$peers/llama-cpp-defaults") >> "$results/fits.jsonl"
        done
    done
}

contended() {
    begin contended
    shapes
    for name in mixtral qwen3moe; do
        local place=(-m "$name.gguf" --prompt-file "$prose") all small
        all=(--baseline-threads "$(fastest "${place[@]}")" --expert-cache 100% -r 2)
        small=(--baseline-threads "$(fastest "${place[@]}" --limit 1.25GiB)" --limit 1.25GiB --order AB -r 1)
        for busy in 0 1; do
            limited contended --busy "$busy" -- "${place[@]}" -t "$cores" --baseline -p 128 -n 32 "${all[@]}"
            limited contended --busy "$busy" -- "${place[@]}" -t "$cores" --baseline -p 128 -n 32 "${small[@]}"
        done
    done
}

startup() {
    begin startup
    shapes
    for name in mixtral phimoe qwen3moe deepseek; do
        compare startup "$name" 1.25GiB -p 0 -n 0 -pg 16,1 -r 1 --no-warmup
    done
}

long() {
    begin long
    shapes
    trained
    # In the shape of a chat; of the synthetic model, whose vocabulary has no words, the text is many more tokens.
    local chat=$models/chat.txt
    [[ -s $chat ]] || python3 benches/policies/chat.py "$bin/hobbit-cli" models/demo.gguf "$prose" "$code" > "$chat"
    local all=(--prompt-file "$chat" -t "$cores" -ub 64 -p 0 -n 2000 -r 1 --no-warmup)
    run long -m "demo-wide.gguf" "${all[@]}" --limit 160MiB --variant alone
    limited long --limit 260MiB --pressure 100MiB --variant 'under pressure' -- \
        -m "demo-wide.gguf" "${all[@]}" --mem-budget 160MiB
    run long -m "qwen3moe.gguf" "${all[@]}" --limit 700MiB --variant alone
    limited long --limit 1000MiB --pressure 300MiB --variant 'under pressure' -- \
        -m "qwen3moe.gguf" "${all[@]}" --mem-budget 700MiB
}

peers() {
    begin peers
    shapes
    trained
    local there=()
    for name in $("$peers/list"); do
        there+=("$peers/$name")
    done
    # Those that read no GGUF are given the model in their own format, outside of the limit: not the same bytes.
    if [[ " ${there[*]} " == *"/transformers "* ]]; then
        "$peers/transformers/convert" "$models/qwen3moe.gguf" > "$models/convert.log" 2>&1
    fi
    head -c 600 "$prose" > "$models/question.txt"
    head -c 150 "$prose" > "$models/short.txt" # no words: a token is a byte or two there
    cd "$models" # Records name models without paths.
    local compare=("$driver" peers -t "$cores" --timeout 300 --baseline "$peers/llama-cpp")
    "${compare[@]}" -m demo-wide.gguf --prompt-file question.txt --limit 200MiB,352MiB -n 64 --ubatch-size 64 "${there[@]}" \
        >> "$results/peers.jsonl"
    for name in mixtral qwen3moe; do
        "${compare[@]}" -m "$name.gguf" --prompt-file short.txt --limit 1.25GiB -n 32 "${there[@]}" >> "$results/peers.jsonl"
    done
    cd "$root"
}

routes() {
    [[ -s ${ROUTES:-} ]] || { echo "$0: routes: name a trace of Qwen3-30B-A3B's routes in ROUTES" >&2; return 2; }
    begin routes
    model qwen3-30b --preset qwen3-30b-a3b --topk "${ROUTES_TOPK:-6}"
    cp "$ROUTES" "$models/routes.trace"
    local all=(-m qwen3-30b.gguf --routes routes.trace -t "$cores" -p 0 -n 0 -pg 28,128)
    run routes "${all[@]}" -r 2 --baseline --order AB --variant 'no limit'
    for limit in 6GiB 4GiB 8GiB; do
        run routes "${all[@]}" -r 1 --limit "$limit" --baseline --order AB \
            --baseline-threads "$(fastest -m qwen3-30b.gguf --routes routes.trace --limit "$limit")"
        # On virtual machines memory that was never touched is slow at first: of three repetitions the later ones tell.
        run routes "${all[@]}" -r 3 --limit "$limit" --variant 'repeated'
        run routes "${all[@]}" -r 3 --limit "$limit" --predictor stacked-gate --variant 'stacked gate'
    done
    for recall in 60 70 90 97; do
        run routes "${all[@]}" -r 3 --limit 6GiB --predictor stacked-gate --routes-recall "$recall%" --variant "stacked gate, recall $recall %"
    done
}

# How near reading and multiplying come to not waiting for each other, and what looking ahead adds: shares of the
# experts in memory, and slower disks.
efficiency() {
    begin efficiency
    shapes
    trained
    local at
    for name in ${EFFICIENCY_MODELS:-qwen3moe mixtral deepseek demo-wide}; do
        # There and back: what the disk does meanwhile meets both.
        for at in none stacked-gate stacked-gate none; do
            local all=(-m "$name.gguf" --prompt-file "$prose" --io direct --expert-cache 25%,50%,75% -t "$cores" -p 0 -n 0
                -pg 16,48 -r 1 --no-warmup --predictor "$at")
            run efficiency "${all[@]}" --variant "$at"
            for speed in 500000000 1000000000 2000000000; do
                limited efficiency --disk-limit "$speed" --variant "$at" -- "${all[@]}"
            done
        done
    done
}

# The models that own_ground.toml names; records and tables are own_ground.py's.
own-ground() {
    local type file
    shapes
    # The trained model of 14 layers with larger experts.
    for type in f32 q8_0 q4_0; do
        file=$models/deep-${type%_0}.gguf
        [[ -s $file ]] || gguf-tools/demo-model/widen.py models/deep.gguf 1024 "$file" --type $type
    done
    MODELS=$models "$here/own_ground.py" run
    "$here/own_ground.py" report
}

report() {
    "$here/report.py" "$results"
    "$here/report.py"
}

studies=("$@")
[[ $# -gt 0 ]] || studies=(papers curve ablation context experts resident fits contended startup long peers efficiency report)
for study in "${studies[@]}"; do
    case $study in
    papers | curve | ablation | context | experts | resident | fits | contended | startup | long) "$study" ;;
    peers | efficiency | routes | own-ground | report) "$study" ;;
    *)
        echo "$0: no study '$study'; see the head of this file" >&2
        exit 2
        ;;
    esac
done
