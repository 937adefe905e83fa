#!/bin/sh
# Makes what a release has, in DIRECTORY: a stripped tarball with llama.cpp's CPU libraries for every generation of
# processors, a Debian package of it, the parts list (CycloneDX), and checksums.
#
#   contrib/release.sh [DIRECTORY]               (default: ./release; a build of llama.cpp takes about 1 GiB more)
#   TARGET=aarch64-unknown-linux-gnu contrib/release.sh
#
# The programs' own code is compiled for x86-64-v2 or for ARMv8 with NEON. Cross-building needs the packages that
# contrib/aarch64.sh names. Builds of one commit in two directories gave the same tarball, package and parts list.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-release}"
out=$(cd "${1:-release}" && pwd)
host=$(rustc -vV | sed -n 's/^host: //p')
target=${TARGET:-$host}
cd "$tree"
./setup.sh

case "$target" in
  x86_64-*) cpu="-C target-cpu=x86-64-v2" debian=amd64 ;;
  aarch64-*) cpu="-C target-feature=+neon" debian=arm64 ;;
  *) echo "release: $target is not built here; x86_64 and aarch64 are" >&2; exit 2 ;;
esac
if [ "$target" != "$host" ]; then
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  export BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu=-I/usr/aarch64-linux-gnu/include
  [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || rustup target add "$target"
  run="qemu-aarch64 -L /usr/aarch64-linux-gnu"
fi

# Paths in messages of this machine's files become short names, and every file has the commit's time.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$out/build}"
export SOURCE_DATE_EPOCH
RUSTFLAGS=$cpu CFLAGS=
for map in "$cargo_home=/cargo" "$tree=/hobbit" "$CARGO_TARGET_DIR=/build"; do
  RUSTFLAGS="$RUSTFLAGS --remap-path-prefix=$map"
  CFLAGS="$CFLAGS -ffile-prefix-map=$map"
done
export RUSTFLAGS CFLAGS CXXFLAGS="$CFLAGS"
# Otherwise the libraries' build IDs and string tables depend on the directory.
export CMAKE_BUILD_RPATH_USE_ORIGIN=ON
export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=false

tools=$CARGO_TARGET_DIR/tools
tool() { # PROGRAM VERSION [OPTIONS]
  program=$1 version=$2
  shift 2
  [ -x "$tools/bin/$program" ] || env -u RUSTFLAGS -u CARGO_TARGET_DIR \
    cargo install --quiet --locked --debug --root "$tools" "$program@$version" "$@"
}
# Unoptimised, comparing licences takes longer than the build.
tool cargo-about 0.9.3 --features cli --config profile.dev.package.spdx.opt-level=3
tool cargo-cyclonedx 0.5.9
tool cargo-deb 3.8.0
PATH=$tools/bin:$PATH

cargo build --release --locked --target "$target" --features dynamic-backends --bins \
  -p hobbit-programs -p hobbit-server -p gguf-tools
built=$CARGO_TARGET_DIR/$target/release

version=$(cargo metadata --no-deps --format-version 1 | sed 's/.*"name":"hobbit-programs","version":"\([^"]*\)".*/\1/')
name=hobbit-$version-${target%%-*}-linux
stage=$out/$name
rm -rf "$stage"
mkdir -p "$stage/models" "$stage/share/man/man1" "$stage/share/completions"
programs="hobbit-cli hobbit-server hobbit-bench hobbit-sim hobbit-perplexity hobbit-rpc gguf-tools"
for program in $programs; do cp "$built/$program" "$stage/"; done
# The names that the loader asks for, as files: no links in the tarball.
for library in "$built"/libllama*.so.0 "$built"/libggml*.so.0 "$built"/libmtmd*.so.0 "$built"/libggml-cpu-*.so; do
  [ -e "$library" ] && cp -L "$library" "$stage/"
done
"${STRIP:-$([ "$target" = "$host" ] && echo strip || echo aarch64-linux-gnu-strip)}" --strip-unneeded "$stage"/*.so*
cp models/demo.gguf models/README.md models/LICENSE-* "$stage/models/"
cp README.md CHANGELOG.md LICENSE contrib/hobbit-server.service contrib/hobbit-server.env "$stage/"
cargo about generate --locked --workspace contrib/notices.hbs -o "$stage/NOTICES.txt"
for program in $programs; do
  ${run:-} "$stage/$program" --man > "$stage/share/man/man1/$program.1"
  for shell in bash zsh fish; do
    ${run:-} "$stage/$program" --completions $shell > "$stage/share/completions/$program.$shell"
  done
done

cd "$out"
find "$name" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
tar --sort=name --owner=0 --group=0 --numeric-owner --format=gnu -cf - "$name" | gzip -9n > "$name.tar.gz"
cd "$tree"
# Where Cargo.toml's list of the package's files looks. Commands are links: libraries are found beside the programs.
rm -rf target/deb && mkdir -p target/deb/bin
ln -s "$stage" target/deb/lib
for program in $programs; do ln -s "../lib/hobbit/$program" "target/deb/bin/$program"; done
cargo deb --no-build --no-strip --locked --target "$target" --deb-version "$version" \
  --output "$out/hobbit_${version}_$debian.deb"
cargo cyclonedx --format json --target "$target" --features dynamic-backends --override-filename "$name.cdx" \
  --manifest-path Cargo.toml
# hobbit-server's parts have all parts of the programs among them.
for package in server gguf-tools; do
  sed "s#path+file://$tree#path+file:///hobbit#g" "$package/$name.cdx.json" > "$out/$name-$package.cdx.json"
done
find "$tree" -name "$name.cdx.json" -not -path "$out/*" -delete
cd "$out"
sha256sum "$name.tar.gz" "hobbit_${version}_$debian.deb" "$name-server.cdx.json" "$name-gguf-tools.cdx.json" \
  > "SHA256SUMS-${target%%-*}"
cat "SHA256SUMS-${target%%-*}"
