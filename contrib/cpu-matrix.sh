#!/usr/bin/env bash
# Runs tests with llama.cpp's CPU kernels for other processors: each of its x86 variants that this processor can run.
#
#   contrib/cpu-matrix.sh                                     the whole test command for each variant
#   contrib/cpu-matrix.sh --list                              the variants, oldest first
#   VARIANTS="x64 haswell" contrib/cpu-matrix.sh -p hobbit-programs --test all exactness::
#   VARIANTS=oldest contrib/cpu-matrix.sh ...                 also: newest
#   RUSTC_WORKSPACE_WRAPPER=$(contrib/cpu-matrix.sh --wrapper) cargo ...
#                                                             this processor's own; what it compiles serves them all
#
# Arguments are those of `cargo test --release`. llama.cpp is not compiled again: for each variant only its kernels are,
# and the programs and tests of this workspace are linked with them in place of this processor's own. hobbit's Rust code
# stays that of this processor; its libraries are compiled once for all variants. The last lines tell which variants
# passed. Kernels lie in target/cpu-matrix; programs in target/release are the last variant's until the next
# `cargo build`.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
matrix=$target/cpu-matrix
host=$(rustc -vV | sed -n 's/^host: //p')
manifest=$(cargo metadata --format-version 1 --filter-platform "$host" |
  grep -o '[^"]*llama-cpp-sys-2-[^"]*/Cargo.toml' | head -1)
sources=$(dirname "$manifest")/llama.cpp

# Whatever holds llama.cpp gets the kernels of this library first, if there is one, and the linker leaves out its own.
use() {
  if [ -e "$matrix/kernels" ] && [ "$(cat "$matrix/kernels")" = "$1" ]; then return; fi
  # Cargo does not see that the kernels are others. What holds the last ones goes, and is linked again. It goes first,
  # so that nothing has the wrong ones if this is interrupted.
  [ ! -e "$matrix/linked" ] || xargs -d '\n' rm -f < "$matrix/linked"
  rm -f "$matrix/linked"
  echo "$1" > "$matrix/kernels"
}
mkdir -p "$matrix"
# rustc knows by the name `cc` what kind of linker it is.
cat > "$matrix/cc" <<CC
#!/bin/bash
case "\$*" in
  *libllama_cpp_sys_2-*) ;;
  *) exec cc "\$@" ;;
esac
for ((i = 1; i < \$#; i++)); do
  if [ "\${!i}" = -o ]; then
    output=\$((i + 1))
    echo "\${!output}" >> "$matrix/linked"
  fi
done
kernels=\$(cat "$matrix/kernels")
exec cc \${kernels:+-Wl,--whole-archive "\$kernels" -Wl,--no-whole-archive} "\$@"
CC
# Cargo keeps what this compiles apart: the path of the wrapper is in the names of its files. bash, because other
# shells lose variables whose names have a hyphen, as Cargo's of the programs.
printf '#!/bin/bash\nexec "$@" -C linker="%s"\n' "$matrix/cc" > "$matrix/rustc"
chmod +x "$matrix/cc" "$matrix/rustc"
if [ "${1:-}" = --wrapper ]; then
  use ""
  echo "$matrix/rustc"
  exit
fi

[ "$(uname -m)" = x86_64 ] || { echo "cpu-matrix: the variants are those of x86-64" >&2; exit 2; }

# "NAME FEATURE..." for each variant, in llama.cpp's order.
all_variants() {
  sed -n '/GGML_SYSTEM_ARCH STREQUAL "x86"/,/GGML_SYSTEM_ARCH STREQUAL "ARM"/p' "$sources/ggml/src/CMakeLists.txt" |
    sed -n 's/^ *ggml_add_cpu_backend_variant(\([a-z0-9]*\) *\([A-Z0-9_ ]*\))$/\1 \2/p'
}

# Whether this processor has a feature of llama.cpp's name.
has() {
  case $1 in
    SSE42) flag=sse4_2 ;;
    AVX512) flag=avx512bw ;;
    AVX512_VBMI) flag=avx512vbmi ;;
    *) flag=$(tr '[:upper:]' '[:lower:]' <<<"$1") ;;
  esac
  grep -m1 '^flags' /proc/cpuinfo | grep -qw "$flag"
}

runnable() {
  all_variants | while read -r name features; do
    missing=
    for feature in $features; do has "$feature" || missing="$missing $feature"; done
    if [ -z "$missing" ]; then echo "$name $features"; else echo "not on this processor: $name ($missing )" >&2; fi
  done
}

if [ "${1:-}" = --list ]; then runnable; exit; fi
runnable > "$matrix/runnable"
case ${VARIANTS:-all} in
  all) chosen=$(cut -d' ' -f1 "$matrix/runnable") ;;
  oldest) chosen=$(head -1 "$matrix/runnable" | cut -d' ' -f1) ;;
  newest) chosen=$(tail -1 "$matrix/runnable" | cut -d' ' -f1) ;;
  *) chosen=$VARIANTS ;;
esac
[ $# -gt 0 ] || set -- --workspace

off=$(all_variants | cut -d' ' -f2- | tr ' ' '\n' | sort -u | sed -n 's/..*/-DGGML_&=OFF/p')
result="$matrix/result"
: > "$result"
for name in $chosen; do
  features=$(sed -n "s/^$name //p" "$matrix/runnable")
  grep -q "^$name " "$matrix/runnable" || { echo "cpu-matrix: this processor cannot run '$name'" >&2; exit 2; }
  dir=$matrix/$name
  mkdir -p "$dir"
  echo "== $name: ${features:-no more than x86-64}"
  # shellcheck disable=SC2046,SC2086 # lists of options
  cmake -S "$sources" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DGGML_NATIVE=OFF $off ${features:+$(printf -- '-DGGML_%s=ON ' $features)} \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF > "$dir/cmake.log"
  cmake --build "$dir/build" --target ggml-cpu --parallel "$(nproc)" >> "$dir/cmake.log"
  use "$dir/build/ggml/src/libggml-cpu.a"
  passed=passed
  RUSTC_WORKSPACE_WRAPPER=$matrix/rustc cargo test --release "$@" || passed=FAILED
  found=$("$target/release/hobbit-cli" -v -n 1 -p hi --no-conversation 2>&1 | sed -n 's/^CPU : //p' || true)
  echo "$name: $passed; $found" >> "$result"
done
echo "== variants"
cat "$result"
! grep -q FAILED "$result"
