# Sourced after paths.sh.
#
# threads_where_short ARGUMENT...   prints the threads for an adapter's arguments, see memory.py
threads_where_short() {
    local model='' threads=''
    while (($# > 1)); do
        case $1 in
            --model) model=$2 ;;
            --threads) threads=$2 ;;
        esac
        shift 2
    done
    [[ -f $model ]] || { echo "$peer: no model $model" >&2; return 1; }
    [[ $threads =~ ^[1-9][0-9]*$ ]] || { echo "$peer: --threads $threads: expected a number from 1 on" >&2; return 1; }
    python3 "$common/memory.py" "$model" "$threads"
}
