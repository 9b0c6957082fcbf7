#!/usr/bin/env bash
# Gathers what SGLang needs on a machine with a GPU and without a network: pack.sh FOLDER (about 45 MB). Wheels that
# a CUDA image with torch, Triton and Transformers seldom has, SGLang's own tree without what its CUDA path does not need
# here, two plain Python files of sglang-kernel, and a wheel of this checkout.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(git -C "$here" rev-parse --show-toplevel)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { # fetch TO ARGUMENTS...: wheels for Python 3.12 on Linux, whatever runs here
  local to=$1 platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
  shift
  for minor in 17 24 26 27 28 31 34 35 36 38 39; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi cp310 --abi abi3 --abi none "${platforms[@]}" --dest "$to" "$@"
}
mkdir -p "$folder/whl"
[[ -e $folder/whl/.done ]] || { fetch "$folder/whl" -r "$here/wheels.txt" && touch "$folder/whl/.done"; }
if [[ ! -e $folder/sglang.tar.gz ]]; then
  fetch "$work" sglang==0.5.23
  (cd "$work" && unzip -q sglang-*.whl && rm -rf sglang/multimodal_gen sglang/benchmark sglang/srt/rust_extensions/*.so &&
    tar czf "$folder/sglang.tar.gz" sglang sglang-*.dist-info)
fi
if [[ ! -e $folder/sgl_kernel/utils.py ]]; then
  fetch "$work" sglang-kernel==0.4.10
  unzip -q -o -j "$work"/sglang_kernel-*.whl sgl_kernel/utils.py sgl_kernel/scalar_type.py -d "$folder/sgl_kernel"
fi
rm -f "$folder"/whl/hwbackends-*.whl
"${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$folder/whl" "$root"
git -C "$root" describe --always --dirty --abbrev=12 >"$folder/commit"
du -sh "$folder"
