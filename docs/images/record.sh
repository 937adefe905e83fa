#!/bin/sh
# Records docs/images/terminal.svg: a real run of hobbit-cli in a terminal, in real time, with asciinema and svg-term.
# The loop holds its last frame for 5 s (hold.py).
#
#   docs/images/record.sh [HOBBIT_CLI]       (default: target/release/hobbit-cli)
#   pip install asciinema==2.4.0; npm install svg-term-cli@2.1.1      puts the two programs on the PATH
set -eu

cd "$(dirname "$0")/../.."
cli=$(realpath "${1:-target/release/hobbit-cli}")
models=$(realpath models)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A shell that shows what it runs: the cast has the commands, as typed, and what they print.
ln -s "$cli" "$work/hobbit-cli"
ln -s "$models/fine.gguf" "$work/fine.gguf"
cat > "$work/session" <<'SESSION'
set -eu
show() {
  printf '\033[1;32m$\033[0m %s\n' "$1"
  sleep 1
  eval "$1"
  printf '\n'
  sleep 2
}
show 'hobbit-cli -m fine.gguf --expert-cache 25% -no-cnv -n 64 -s 7 -p "def read_lines(path):"'
show 'hobbit-cli -m fine.gguf --expert-cache 25% --cache-bias 0.2 -no-cnv -n 64 -s 7 -p "def read_lines(path):"'
SESSION
images=$PWD/docs/images
cd "$work"
export HOBBIT_ARG_CACHE_STATE=off # not with the experts of an earlier run
PATH=$work:$PATH asciinema rec --quiet --overwrite --cols 118 --rows 28 -c "sh session" run.cast
svg-term --in run.cast --out "$images/terminal.svg" --window --no-cursor --width 118 --height 28
"$images/hold.py" "$images/terminal.svg" 5
