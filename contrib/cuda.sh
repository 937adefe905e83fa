#!/bin/sh
# Builds hobbit for CUDA with a toolkit that is put together from the wheels that NVIDIA publishes on PyPI: no root, no
# GPU.
#
#   contrib/cuda.sh [DIRECTORY]      (default: ./cuda; about 1 GiB for the toolkit, 3 GiB for the build)
#
# ARCH is the GPU's compute capability (default 89: RTX 40; 86: RTX 30; 90: H100). Another ARCH in the same DIRECTORY
# compiles llama.cpp again, and its programs replace those before. TOOLKIT_ONLY=1 stops before the build. CHECK=1 builds
# what benches/gpu/check.sh runs instead, and packs it: DIRECTORY/check.tar.xz, for one compute capability and without
# the kernels of fused attention. For other people's processors give RUSTFLAGS="-C target-cpu=x86-64-v3", too. The
# script does not run the result on a GPU. The program needs libcublas.so.13 and libcublasLt.so.13 at run time (they lie
# in DIRECTORY/toolkit/lib) and the driver's libcuda.so.1: without a driver it does not start, unless LD_LIBRARY_PATH is
# DIRECTORY/toolkit/lib/stubs, with which it finds no device.
set -eu

tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-cuda}"
place=$(cd "${1:-cuda}" && pwd)
arch=${ARCH:-89}

# 1. The wheels, and in them one tree: bin, include, lib, nvvm.
if [ ! -x "$place/toolkit/bin/nvcc" ]; then
  python3 -m pip download --quiet --no-deps --dest "$place/wheels" \
    nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas
  for wheel in "$place"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$place/unpacked"; done
  nvcc=$(find "$place/unpacked/nvidia" -path '*/bin/nvcc' | head -n 1)
  root=${nvcc%/bin/nvcc}
  chmod +x "$root"/bin/* "$root"/nvvm/bin/* # zipfile forgets who may run what
  mv "$root" "$place/toolkit"
  rm -r "$place/unpacked" "$place/wheels"
fi
toolkit=$place/toolkit

# 2. Wheels have no names for the linker, no driver, and no static cuBLAS, for which llama.cpp's bindings ask by name:
# links, a stand-in for the driver (the real one comes with the GPU's), and empty archives beside which the shared
# library is linked.
cd "$toolkit/lib"
for library in libcudart libcublas libcublasLt; do ln -sf "$(basename "$library".so.[0-9]*)" "$library.so"; done
ln -sfn lib "$toolkit/lib64"
mkdir -p stubs
grep -oE '\bcu[A-Z][A-Za-z0-9_]+' "$toolkit/include/cuda.h" | sort -u | sed 's/.*/int &(void) { return 1; }/' |
  cc -shared -fPIC -x c - -Wl,-soname,libcuda.so.1 -o stubs/libcuda.so
ln -sf libcuda.so stubs/libcuda.so.1
ln -sf stubs/libcuda.so libcuda.so
echo | cc -c -x c - -o empty.o
for library in cublas_static cublasLt_static culibos; do rm -f "lib$library.a" && ar rcs "lib$library.a" empty.o; done
rm empty.o

# 3. One kernel, compiled and linked with what hobbit needs.
export PATH="$toolkit/bin:$PATH" CUDA_PATH="$toolkit" CUDAToolkit_ROOT="$toolkit"
cat > "$place/probe.cu" <<'EOF'
#include <cublas_v2.h>
__global__ void twice(float * x) { x[threadIdx.x] *= 2.0f; }
int main() { cublasHandle_t handle; twice<<<1, 32>>>(nullptr); return cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS ? 0 : 1; }
EOF
nvcc -arch="sm_$arch" -o "$place/probe" "$place/probe.cu" -L"$toolkit/lib" -lcudart -lcublas
echo "toolkit: $(nvcc --version | sed -n 's/^Cuda compilation tools, //p'), in $toolkit"
[ -z "${TOOLKIT_ONLY:-}" ] || exit 0

# 4. hobbit.
export CMAKE_CUDA_ARCHITECTURES="$arch" CMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" CUDA_LIBRARY_PATH="$toolkit"
export RUSTFLAGS="${RUSTFLAGS:--C target-cpu=native} -C link-arg=-L$toolkit/lib -C link-arg=-lcublas -C link-arg=-lcublasLt
  -C link-arg=-Wl,-rpath,$toolkit/lib"
cd "$tree"
# Removes llama.cpp if it was compiled for another ARCH: llama-cpp-sys-2 does not notice that ARCH changed.
remove_other_arch() {
  for cache in "$1"/release/build/llama-cpp-sys-2-*/out/build/CMakeCache.txt; do
    if [ -f "$cache" ] && ! grep -q "^CMAKE_CUDA_ARCHITECTURES:.*=$arch\$" "$cache"; then
      cargo clean --release --locked -p llama-cpp-sys-2 --target-dir "$1"
    fi
  done
}
if [ -n "${CHECK:-}" ]; then
  # llama-cpp-sys-2 hands GGML_ variables to CMake. A directory of its own: it would not notice a change.
  export GGML_CUDA_FA=OFF CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=false
  remove_other_arch "$place/check-build"
  cargo build --release --locked --features cuda -p hobbit-programs -p gguf-tools --bin hobbit-bench --bin gguf-tools \
    --test devices --target-dir "$place/check-build"
  built=$place/check-build/release check=$place/check
  mkdir -p "$check/target/release" "$check/benches/gpu" "$check/models"
  cp "$built/hobbit-bench" "$built/gguf-tools" "$check/target/release"
  tests=$(find "$built/deps" -name 'devices-*' -perm -100 -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)
  cp "$tests" "$check/target/release/devices"
  cp benches/gpu/check.sh benches/gpu/check.py "$check/benches/gpu"
  cp models/fine-heldout-prose.txt "$check/models"
  # Each program has the kernels: a wide dictionary packs them once.
  tar -C "$place" -c check | xz --lzma2=preset=6,dict=256MiB > "$place/check.tar.xz"
  ls -l "$check/target/release" "$place/check.tar.xz"
  exit 0
fi
remove_other_arch "$place/target"
cargo build --release --locked --features cuda --bin hobbit-cli --target-dir "$place/target"
ldd "$place/target/release/hobbit-cli" | grep -E 'cuda|cublas'
