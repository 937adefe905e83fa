# Where peers live. Sourced by every setup.sh and run, which say what they are called: `peer=NAME`.
#
# Sets: common (this directory), root (of the repository), peers_dir (of all peers), home (of this one, not made here).

common=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$common/../../.." && pwd)
peers_dir=${PEERS_DIR:-$root/target/peers}
[[ $peers_dir == /* ]] || peers_dir=$root/$peers_dir
home=$peers_dir/$peer

# Ends an adapter whose tool is not there.
need() {
    [[ -e $1 ]] && return
    echo "$peer is not set up: no $1; run benches/peers/setup.sh $peer" >&2
    exit 1
}

# Marks this peer as set up, for `list`; says what of it.
ready() {
    echo "$1" >"$home/ready"
}
