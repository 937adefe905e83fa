#!/bin/sh
# Builds hobbit's programs for 64-bit Windows on Debian, runs them and some tests under Wine, and makes a zip of them.
# Speeds under Wine say nothing about Windows.
#
#   contrib/windows.sh [DIRECTORY]     (default: ./windows; about 3 GiB)
#
# The packages are in contrib/windows/env. CPU is the oldest processor (default x86-64-v3: AVX2), TESTS the starts of
# the tests' names, FLAGS more flags for cargo, BUILD_ONLY=1 stops before the tests.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-windows}"
place=$(cd "${1:-windows}" && pwd)
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$place/build}"
cd "$tree"
. contrib/windows/env

flags="--release --locked --target $target --config profile.release.debug=0 ${FLAGS:-}"
# shellcheck disable=SC2086
cargo build $flags --bins -p hobbit-programs -p hobbit-server -p gguf-tools
built=$CARGO_TARGET_DIR/$target/release
programs="hobbit-cli hobbit-server hobbit-bench hobbit-sim hobbit-perplexity hobbit-rpc gguf-tools"

version=$(cargo metadata --no-deps --format-version 1 | sed 's/.*"name":"hobbit-programs","version":"\([^"]*\)".*/\1/')
name=hobbit-$version-x86_64-windows
rm -rf "${place:?}/$name" "$place/$name.zip"
mkdir -p "$place/$name/models"
for program in $programs; do
  x86_64-w64-mingw32-strip -o "$place/$name/$program.exe" "$built/$program.exe"
done
cp models/demo.gguf models/README.md models/LICENSE-* "$place/$name/models/"
cp README.md CHANGELOG.md LICENSE docs/WINDOWS.md "$place/$name/"
if command -v cargo-about >/dev/null; then
  cargo about generate --locked --workspace contrib/notices.hbs -o "$place/$name/NOTICES.txt"
else
  echo "windows: without cargo-about the zip has no NOTICES.txt, the licences of crates" >&2
fi
(cd "$place" && zip -qr "$name.zip" "$name")
echo "windows: $place/$name.zip, $(wc -c < "$place/$name.zip") bytes"

# In a directory whose name has a space and a letter beyond ASCII.
try=$place/try/"with späce"
rm -rf "$place/try"
mkdir -p "$try"
(cd "$try" && unzip -q "$place/$name.zip")
wine_ready
wine_library "$try/$name"
cd "$try/$name"
step() { echo "== $*"; }
wined() { # PROGRAM FLAGS...: shows the log only if the program fails
  wine "$@" 2>"$place/try/log" || { echo "windows: $1 ends with $?:" >&2; cat "$place/try/log" >&2; exit 1; }
}
step "versions"
for program in $programs; do
  wined "$program.exe" --version </dev/null >"$place/try/version"
  head -1 "$place/try/version"
done
partial="--expert-cache 25% --io direct"
step "text with a quarter of the experts in memory, from the model and from a pack of it"
wined gguf-tools.exe pack models/demo.gguf -o models/pack.gguf </dev/null
for model in demo pack; do
  # shellcheck disable=SC2086
  wined hobbit-cli.exe -m models/$model.gguf -p "Once upon a time" -n 24 --temp 0 $partial -no-cnv </dev/null \
    >"$place/try/$model.txt"
done
cat "$place/try/demo.txt"
cmp "$place/try/demo.txt" "$place/try/pack.txt"
step "a conversation"
# shellcheck disable=SC2086
printf '%s\n' 'Who are you?' /exit | wined hobbit-cli.exe -m models/demo.gguf -n 16 --temp 0 $partial -cnv
echo
step "logits of llama.cpp and of hobbit"
# shellcheck disable=SC2086
wined hobbit-bench.exe -m models/demo.gguf --baseline --order AB --no-roofline $partial -p 0 -n 0 -pg 48,16 -r 1 -t 1 \
  -o jsonl </dev/null >"$place/try/bench.jsonl"
grep -o '"hobbit_logits_[a-z]*":[0-9]*' "$place/try/bench.jsonl"
step "the server"
port=${PORT:-18097}
# shellcheck disable=SC2086
wine hobbit-server.exe -m models/demo.gguf $partial --port "$port" </dev/null 2>"$place/try/server.log" &
server=$!
trap 'kill -9 $server 2>/dev/null || true' EXIT
ask() { curl -sSf --max-time 120 "http://127.0.0.1:$port$1" ${2:+-d "$2"} -H 'content-type: application/json'; }
tries=0
until ask /health >/dev/null 2>&1; do
  tries=$((tries + 1))
  if [ $tries = 120 ] || ! kill -0 $server; then cat "$place/try/server.log"; exit 1; fi
  sleep 1
done
chat='"messages":[{"role":"user","content":"Hello"}],"max_tokens":8,"temperature":0'
ask /v1/chat/completions "{$chat}" | grep -o '"content":"[^"]*"'
ask /v1/chat/completions "{$chat,\"stream\":true}" | grep -c '^data: '
ask / | grep -o '<title>.*</title>'
kill -INT $server
status=0
wait $server || status=$?
trap - EXIT
echo "the server ends with $status"
cd "$tree"
[ -z "${BUILD_ONLY:-}" ] || exit 0

# Names are those of tests/all.rs and server/tests/all.rs.
wine_library "$built"
wine_library "$built/deps"
failed=
tests() { # PACKAGE TEST NAMES...
  package=$1 test=$2
  shift 2
  # shellcheck disable=SC2086
  cargo test $flags -p "$package" $test -- "$@" </dev/null || failed="$failed $package"
}
tests hobbit-core --lib
tests gguf-tools "--bins --test main"
tests hobbit-programs "--test all" ${TESTS:-exactness:: budget:: robustness:: cli:: sampling::}
# Wine does not tell how long another process computed, by which these two notice slow templates.
tests hobbit-server "--test all" ${SERVER_TESTS:-http:: media::} \
  --skip slow_schemas_and_templates_do_not_delay_other_requests --skip one_client_does_not_take_the_turns_of_others
[ -z "$failed" ] || { echo "windows: failed:$failed" >&2; exit 1; }
