#!/bin/sh
# Counts the instructions of hobbit's hot paths under valgrind and compares them with instructions.json: exit code 1 if
# one takes more than the margin allows. Installs gungraun's runner (into the target directory) and valgrind if missing.
#
# usage: benches/guard/check.sh [--record] [--margin PERCENT]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
target=${CARGO_TARGET_DIR:-$here/target}
mkdir -p "$target"
CARGO_TARGET_DIR=$(cd "$target" && pwd)
export CARGO_TARGET_DIR
# These would replace the flags of .cargo/config.toml.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS

command -v valgrind >/dev/null 2>&1 || {
  command -v apt-get >/dev/null 2>&1 || {
    echo "guard: valgrind is missing: install it, then run this again" >&2
    exit 1
  }
  if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo"; fi
  echo "guard: installing valgrind" >&2
  $as_root apt-get update -qq >&2
  $as_root apt-get install -y -qq --no-install-recommends valgrind >&2
}

# The library refuses a runner of another version than its own.
version=$(sed -n 's/^gungraun = "=\(.*\)"$/\1/p' Cargo.toml)
tools=$CARGO_TARGET_DIR/guard-tools-$version
if ! [ -x "$tools/bin/gungraun-runner" ]; then
  # Without optimisation: it waits for valgrind most of the time, and compiles in half of the time. From / no
  # configuration applies.
  echo "guard: installing gungraun-runner $version" >&2
  (cd / && CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug --root "$tools" \
    --target-dir "$CARGO_TARGET_DIR/guard-tools" "gungraun-runner@$version" >&2)
  rm -rf "$CARGO_TARGET_DIR/guard-tools"
fi

counted=$CARGO_TARGET_DIR/guard-counts.json
# Counts of an earlier run are no baseline.
rm -rf "$CARGO_TARGET_DIR/gungraun/hobbit-guard"
export GUNGRAUN_RUNNER=$tools/bin/gungraun-runner
cargo bench --locked --bench instructions -- --output-format=json > "$counted"
exec ./compare.py "$@" < "$counted"
