#!/bin/sh
# Makes the documentation's site with mdBook (cargo install mdbook). Pages lie in the whole tree, so they are copied
# first; the tables of single hosts, which mdBook would leave as Markdown, get a chapter each.
#
#   docs/book.sh [DIRECTORY]      (default: target/book; open index.html)
set -eu

cd "$(dirname "$0")/.."
out=${1:-target/book}
mkdir -p "$out" target
out=$(cd "$out" && pwd)
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT

git ls-files -z -- '*.md' '*.svg' '*.png' '*.py' '*.sh' '*.jsonl' LICENSE contrib models/*.txt \
  | tar --null -T - -cf - | tar -xf - -C "$pages"
{
  sed -e 's#](#](docs/#' -e 's#](docs/\.\./#](#' docs/SUMMARY.md
  printf '\n# Tables of single hosts\n\n'
  git ls-files 'benches/results/*/*.md' 'benches/results/*/*/*.md' | while read -r page; do
    printf -- '- [%s](%s)\n' "${page#benches/results/}" "$page"
  done
} > "$pages/SUMMARY.md"
cat > "$pages/book.toml" <<'TOML'
[book]
title = "hobbit"
description = "Mixture-of-Experts models that are larger than memory"
language = "en"
src = "."

[output.html]
git-repository-url = "https://github.com/hobbit-moe/hobbit"
TOML
mdbook build "$pages" --dest-dir "$out"
