#!/usr/bin/env bash
# A Node module and its prebuilt llama.cpp for the CPU, without those for GPUs.
set -euo pipefail
peer=node-llama-cpp
source "$(dirname "${BASH_SOURCE[0]}")/../common/paths.sh"

version=3.22.1
case $(uname -sm) in
    "Linux x86_64") binary=@node-llama-cpp/linux-x64 ;;
    "Linux aarch64") binary=@node-llama-cpp/linux-arm64 ;;
    "Darwin x86_64") binary=@node-llama-cpp/mac-x64 ;;
    *) echo "$peer: no prebuilt binary for the CPU of $(uname -sm) is known here" >&2; exit 1 ;;
esac

mkdir -p "$home"
echo '{"private": true, "type": "module"}' >"$home/package.json"
cd "$home"
# The binaries are in packages of their own; the install script would look for others or build them.
npm install --no-audit --no-fund --omit=optional --ignore-scripts --loglevel=error \
    "node-llama-cpp@$version" "$binary@$version"
ready "node-llama-cpp@$version"
