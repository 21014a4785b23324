#!/usr/bin/env bash
# Packs what tests/gpu/run.sh needs on a GPU machine that has CUDA's libraries and nothing else of ours: the built programs,
# the shared libraries that they load but CUDA's and the C library's, and the data.
#
#   tests/gpu/bundle.sh [BUILD_FOLDER] [ARCHIVE]      build ps-gpu.tar.xz
#
# There: tar -xf ps-gpu.tar.xz && ps-gpu/run.sh. With PS_DATA_DIR set, its folder mnist is packed too.
set -euo pipefail

readonly build=${1:-build} archive=${2:-ps-gpu.tar.xz} limit_mib=64
readonly root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly programs=(ps_server ps_worker ps_ctl ps_bench model_test integration_test)
readonly fashion=/usr/share/datasets/fashion-mnist

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
readonly out=$folder/ps-gpu
mkdir -p "$out"/{bin,lib,data}

for program in "${programs[@]}"; do
  if [[ ! -x $build/bin/$program ]]; then
    echo "bundle: $build/bin/$program does not exist; build with tests first" >&2
    exit 1
  fi
  cp "$build/bin/$program" "$out/bin/"
  strip "$out/bin/$program"
done
if ! grep -q '^PS_HAVE_CUDA_BACKEND:INTERNAL=ON' "$build/CMakeCache.txt"; then
  echo "bundle: $build has no CUDA backend; configure with -DPS_CUDA=ON" >&2
  exit 1
fi

# CUDA's come from the GPU machine, where they fit its driver; the C library's must be its own.
ldd "${programs[@]/#/$out/bin/}" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -v -E '/lib(c|m|dl|rt|pthread|resolv|cuda|cudart|cublas|cublasLt|nvidia-.*)\.so' |
  xargs -I{} cp -L {} "$out/lib/"
cp -r "$root/tests/data" "$out/data/tests"
if [[ -d $fashion ]]; then cp -rL "$fashion" "$out/data/fashion-mnist"; fi
if [[ -n ${PS_DATA_DIR:-} && -d $PS_DATA_DIR/mnist ]]; then cp -rL "$PS_DATA_DIR/mnist" "$out/data/mnist"; fi
cp "$root/tests/gpu/"{run.sh,torch_step.py} "$out/"

tar -C "$folder" -cf - ps-gpu | xz -T0 -6 >"$archive"
size=$(stat -c %s "$archive")
printf 'bundle: %s, %d.%d MiB\n' "$archive" $((size >> 20)) $(((size & 0xFFFFF) * 10 >> 20))
if ((size > limit_mib << 20)); then
  echo "bundle: more than $limit_mib MiB" >&2
  exit 1
fi
