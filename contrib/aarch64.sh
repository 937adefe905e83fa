#!/bin/sh
# Builds hobbit for 64-bit ARM on another machine and runs its exactness tests under qemu: that a session with experts
# out of memory computes what llama.cpp computes there, bit for bit. Speeds under qemu say nothing.
#
#   contrib/aarch64.sh [DIRECTORY]     (default: ./aarch64; about 1.5 GiB)
#
# Debian's packages: gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user clang libclang-dev
# cmake. ARCH is the architecture of llama.cpp's kernels (default armv8.2-a+dotprod), CPU the one that qemu emulates
# (default max), TESTS the start of the tests' names (default: exactness), NAMES single tests, BUILD_ONLY=1 stops
# before.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-aarch64}"
place=$(cd "${1:-aarch64}" && pwd)
target=aarch64-unknown-linux-gnu
root=/usr/aarch64-linux-gnu

for tool in aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ qemu-aarch64 cmake; do
  command -v "$tool" >/dev/null || { echo "aarch64: $tool is missing; see the packages in $0" >&2; exit 1; }
done
[ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || rustup target add "$target"

# Instead of target-cpu=native, which is this machine's.
export RUSTFLAGS="${RUSTFLAGS:--C target-feature=+neon}"
export GGML_CPU_ARM_ARCH="${ARCH:-armv8.2-a+dotprod}"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu ${CPU:-max} -L $root"
export BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu="-I$root/include"
export CARGO_TARGET_DIR="$place"

cd "$tree"
flags="--release --locked --target $target --no-default-features --features engine --test all"
# shellcheck disable=SC2086
cargo test $flags --no-run
[ -z "${BUILD_ONLY:-}" ] || exit 0
# Each in a process of its own: qemu keeps what it has translated, and a budget counts that.
# shellcheck disable=SC2086
names=${NAMES:-$(cargo test $flags -- --list 2>/dev/null | sed -n "/^${TESTS:-exactness}/s/: test\$//p")}
failed=
for name in $names; do
  # shellcheck disable=SC2086
  cargo test --quiet $flags -- --exact "$name" </dev/null && echo "aarch64: $name passed" || failed="$failed $name"
done
[ -z "$failed" ] || { echo "aarch64: failed:$failed" >&2; exit 1; }
