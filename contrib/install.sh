#!/bin/sh
# Installs every program: hobbit-cli, hobbit-server, hobbit-bench, hobbit-sim, hobbit-perplexity, hobbit-rpc and
# gguf-tools, with completions and manual pages. llama.cpp is built once.
#
#   contrib/install.sh [PREFIX]      (default: ~/.cargo, whose bin rustup puts on the PATH)
#
# FEATURES are cargo's: FEATURES=cuda, vulkan, metal or dynamic-backends. SKIP_PAGES=1 leaves completions and manual
# pages out.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-${CARGO_HOME:-$HOME/.cargo}}"
prefix=$(cd "${1:-${CARGO_HOME:-$HOME/.cargo}}" && pwd)
cd "$tree"
./setup.sh
target=${CARGO_TARGET_DIR:-$tree/target}
cargo install --locked --path . --root "$prefix" --target-dir "$target" ${FEATURES:+--features "$FEATURES"}
cargo install --locked --path server --root "$prefix" --target-dir "$target" ${FEATURES:+--features "$FEATURES"}
cargo install --locked --path gguf-tools --root "$prefix" --target-dir "$target" \
  ${FEATURES:+--features "$FEATURES"}
programs="hobbit-cli hobbit-server hobbit-bench hobbit-sim hobbit-perplexity hobbit-rpc gguf-tools"
# Without strip they are larger, and work as well. Stripping afterwards uses what the release profile has built.
for program in $programs; do
  [ ! -x "$prefix/bin/$program" ] || strip "$prefix/bin/$program" || true
done
[ -z "${SKIP_PAGES:-}" ] || exit 0

# Man looks beside the programs (PREFIX/share), shells below XDG_DATA_HOME for what a user has, below /usr/local for
# everybody.
case "$prefix" in
  "$HOME"/*) share=${XDG_DATA_HOME:-$HOME/.local/share} ;;
  *) share=$prefix/share ;;
esac
mkdir -p "$prefix/share/man/man1" "$share/bash-completion/completions" "$share/zsh/site-functions" "$share/fish/vendor_completions.d"
for program in $programs; do
  [ -x "$prefix/bin/$program" ] || continue
  "$prefix/bin/$program" --man > "$prefix/share/man/man1/$program.1"
  "$prefix/bin/$program" --completions bash > "$share/bash-completion/completions/$program"
  "$prefix/bin/$program" --completions zsh > "$share/zsh/site-functions/_$program"
  "$prefix/bin/$program" --completions fish > "$share/fish/vendor_completions.d/$program.fish"
done
echo "installed below $prefix; completions below $share (zsh: $share/zsh/site-functions must be in fpath)"
