# A peer that is built from a directory with its sources, which a variable names: no registry has it. Sourced after
# paths.sh.
#
# The file `source-directory` beside its setup.sh has the variable's name.

# source_directory   sets `sources` and `commit`
source_directory() {
    local variable
    variable=$(<"$(dirname "${BASH_SOURCE[1]}")/source-directory")
    sources=${!variable:-}
    if [[ ! -f $sources/CMakeLists.txt ]]; then
        echo "$peer: no CMakeLists.txt in '$sources'; name the directory with its sources in $variable" >&2
        exit 1
    fi
    sources=$(cd "$sources" && pwd)
    # A directory inside of another repository has that repository's commit, not one of its own.
    commit=unknown
    if [[ $(git -C "$sources" rev-parse --show-toplevel 2>/dev/null) == "$sources" ]]; then
        commit=$(git -C "$sources" describe --always --dirty)
    fi
}

# build_program PROGRAM LIBRARY INCLUDES FLAG...   builds an adapter's program with the tool, as bin/generate
build_program() {
    local program=$1 library=$2 includes=$3
    shift 3
    mkdir -p "$home/bin"
    cmake -S "$sources" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
        -DCMAKE_PROJECT_INCLUDE="$common/peer.cmake" -DPEER_PROGRAM="$program" -DPEER_LIBRARIES="$library" \
        -DPEER_INCLUDES="$includes" -DPEER_VERSION="$commit" "$@" >"$home/cmake.log"
    cmake --build "$home/build" --target peer-generate --parallel "${PEERS_JOBS:-$(nproc)}"
    ln -sf ../build/peer-generate "$home/bin/generate"
}
