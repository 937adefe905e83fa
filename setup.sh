#!/bin/sh
# Installs the tools that llama.cpp's build needs and that are missing: cmake, a C++ compiler and libclang. On systems
# other than Debian's, or without permission, it names them.
# usage: ./setup.sh [--browser | --ci]
#   --browser: also Chromium and its driver, for the tests of the server's page
#   --ci: that, Firefox, Python with pip, and a compiler for Windows with Wine, for .ci/run
set -eu

case "${1:-}" in
"" | --browser | --ci) ;;
*)
  echo "setup: $1 is unknown; usage: ./setup.sh [--browser | --ci]" >&2
  exit 2
  ;;
esac

missing=""
command -v cargo >/dev/null 2>&1 || {
  echo "setup: cargo is missing: install Rust (rustup; tested with 1.95), then run this again" >&2
  exit 1
}
# The one of Debian 12 is 1.63, whose own message names no remedy.
minor=$(cargo --version | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
if [ -n "$minor" ] && [ "$minor" -lt 89 ]; then
  echo "setup: $(cargo --version) is too old: install Rust with rustup (1.89 or newer; tested with 1.95)" >&2
  exit 1
fi
command -v git >/dev/null 2>&1 || missing="$missing git"
command -v cmake >/dev/null 2>&1 || missing="$missing cmake"
command -v make >/dev/null 2>&1 || missing="$missing make"
command -v c++ >/dev/null 2>&1 || missing="$missing g++"
have_libclang() {
  [ -n "${LIBCLANG_PATH:-}" ] && return 0
  [ "$(uname)" = Linux ] || return 0 # bindgen finds the system's own
  for library in /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* /usr/lib64/libclang*.so*; do
    [ -e "$library" ] && return 0
  done
  return 1
}
# bindgen also needs clang's own headers, which come with clang.
command -v clang >/dev/null 2>&1 || missing="$missing clang"
have_libclang || missing="$missing libclang-dev"
if [ "${1:-}" = --ci ]; then
  python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
  command -v firefox >/dev/null 2>&1 || missing="$missing firefox-esr"
  command -v x86_64-w64-mingw32-g++-posix >/dev/null 2>&1 || missing="$missing g++-mingw-w64-x86-64-posix"
  command -v wine >/dev/null 2>&1 || missing="$missing wine64 wine"
fi
if [ -n "${1:-}" ]; then
  command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
  command -v chromedriver >/dev/null 2>&1 || missing="$missing chromium-driver"
fi
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ]; then
    as_root=""
  elif command -v sudo >/dev/null 2>&1; then
    as_root="sudo"
  else
    echo "setup: missing packages; as root run: apt-get install$missing" >&2
    exit 1
  fi
  echo "setup: installing$missing" >&2
  $as_root apt-get update -qq >&2
  # shellcheck disable=SC2086
  $as_root apt-get install -y -qq --no-install-recommends $missing >&2
else
  echo "setup: please install (Debian names):$missing" >&2
  exit 1
fi
