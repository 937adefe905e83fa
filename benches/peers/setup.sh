#!/usr/bin/env bash
# Sets peers up: those named, or all. Goes on after one that fails; the last line says which did.
#
# usage: benches/peers/setup.sh [NAME...]
# Those that no registry has want a directory with their sources, in the variable that NAME/source-directory names;
# without it, they are left out, unless named.
# PEERS_DIR   where to [default: target/peers in the repository]
# PEERS_JOBS  how many compilers at once [default: one a core]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

names=("$@")
if ((${#names[@]} == 0)); then
    for script in "$here"/*/setup.sh; do
        name=$(basename "$(dirname "$script")")
        if [[ -f $here/$name/source-directory ]]; then
            variable=$(<"$here/$name/source-directory")
            [[ -n ${!variable:-} ]] || { echo "== $name: left out, no $variable"; continue; }
        fi
        names+=("$name")
    done
fi

failed=()
for name in "${names[@]}"; do
    if [[ ! -x $here/$name/setup.sh ]]; then
        echo "no peer $name; there are: $(cd "$here" && echo */setup.sh | sed 's|/setup.sh||g')" >&2
        failed+=("$name")
        continue
    fi
    echo "== $name"
    "$here/$name/setup.sh" || failed+=("$name")
done

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
