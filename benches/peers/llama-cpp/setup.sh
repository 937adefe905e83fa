#!/usr/bin/env bash
# Builds llama.cpp's library and tools from the sources in the crate llama-cpp-sys-4, and generate.cpp with it.
#
# Needs cargo, cmake and a C++ compiler. Of the crate nothing is compiled: cargo only fetches it.
set -euo pipefail

crate=llama-cpp-sys-4
version=0.11.0
tools=(llama-completion llama-bench llama-perplexity)

peer=llama-cpp
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/paths.sh"

stamp=$home/ready
if [[ -f $stamp && $(<"$stamp") == "$version" && ! $here/generate.cpp -nt $stamp ]]; then
    echo "$peer: $crate $version is built"
    exit
fi

# A package that depends on the crate, for cargo to fetch and find it.
fetch=$home/fetch
mkdir -p "$fetch/src"
echo 'fn main() {}' >"$fetch/src/main.rs"
cat >"$fetch/Cargo.toml" <<EOF
[package]
name = "fetch"
version = "0.0.0"
edition = "2021"

[dependencies]
$crate = "=$version"

[workspace]
EOF
manifest=$(cargo metadata --quiet --format-version 1 --manifest-path "$fetch/Cargo.toml" | python3 -c '
import json, sys
print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == sys.argv[1]))' "$crate")

sources=$(dirname "$manifest")/llama.cpp
# The crate's README says which commit of llama.cpp it carries; outside of git, the build cannot know.
commit=$(sed -n 's/.*llama.cpp version:\*\* `\([0-9a-f]*\) .*/\1/p' "$(dirname "$manifest")/README.md")
build=$(sed -n 's/.*llama.cpp version:\*\* `[0-9a-f]* (b\([0-9]*\).*/\1/p' "$(dirname "$manifest")/README.md")

cmake -S "$sources" -B "$home/build" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_NUMBER="${build:-0}" -DLLAMA_BUILD_COMMIT="${commit:-unknown}" \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$home/cmake.log"
cmake --build "$home/build" --target "${tools[@]}" --parallel "${PEERS_JOBS:-$(nproc)}"

mkdir -p "$home/bin"
for tool in "${tools[@]}"; do
    ln -sf "../build/bin/$tool" "$home/bin/$tool"
done

libraries=(src/libllama.a ggml/src/libggml.a ggml/src/libggml-cpu.a ggml/src/libggml-base.a)
"${CXX:-c++}" -std=c++17 -O2 -Wall -o "$home/bin/generate" "$here/generate.cpp" \
    -DPEER_VERSION="\"b${build:-0} ${commit:-unknown} ($crate $version)\"" \
    -I "$sources/include" -I "$sources/ggml/include" -I "$sources/vendor" \
    "${libraries[@]/#/$home/build/}" -fopenmp -pthread -ldl
ready "$version"
