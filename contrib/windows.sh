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
compiler_libraries "$place/$name"
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
for program in $programs; do
  wine "$program.exe" --version </dev/null | head -1
done
wine hobbit-cli.exe -m models/demo.gguf -p "Once upon a time" -n 24 --temp 0 --expert-cache 25% --io direct -no-cnv \
  </dev/null 2>"$place/try/cli.log" || { cat "$place/try/cli.log"; exit 1; }
cd "$tree"
[ -z "${BUILD_ONLY:-}" ] || exit 0

# Names are those of tests/all.rs and server/tests/all.rs.
for directory in "$built" "$built/deps"; do
  wine_library "$directory"
  compiler_libraries "$directory"
done
failed=
tests() { # PACKAGE TEST NAMES...
  package=$1 test=$2
  shift 2
  # shellcheck disable=SC2086
  cargo test $flags -p "$package" $test -- "$@" </dev/null || failed="$failed $package"
}
tests hobbit-core --lib
tests hobbit-programs "--test all" ${TESTS:-exactness:: budget:: robustness:: cli:: sampling::}
tests hobbit-server "--test all" ${SERVER_TESTS:-http::}
[ -z "$failed" ] || { echo "windows: failed:$failed" >&2; exit 1; }
