#!/usr/bin/env bash
# Makes the archive that run.sh takes on a GPU machine without a network (Python 3.12, torch with CUDA, transformers):
# the CUDA wheel's tree of vLLM without what a Hopper GPU and TRITON_ATTN do not need, and its dependencies.
# Usage: pack.sh FOLDER; about 40 MB in FOLDER/vllm-site.tar.xz. Needs a network, pip, unzip and xz.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
target=(--python-version 3.12 --implementation cp --only-binary=:all: --platform any)
for glibc in 17 24 26 27 28 31 34 35; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mkdir -p "$folder/wheels" "$folder/vllm-wheel"
"$python" -m pip download --quiet --no-deps "${target[@]}" -d "$folder/wheels" -r "$here/wheels.txt"
"$python" -m pip download --quiet --no-deps "${target[@]}" -d "$folder/vllm-wheel" vllm==0.32.0
rm -rf "$folder/site"
"$python" -m pip install --quiet --no-index --no-deps --no-compile "${target[@]}" --target "$folder/site" "$folder"/wheels/*.whl
unzip -q -o "$folder"/vllm-wheel/*.whl 'vllm/*' 'vllm-0.32.0*/*' -d "$folder/site" \
  -x 'vllm/vllm_flash_attn/*.so' 'vllm/_moe*' 'vllm/vllm-rs' 'vllm/_flash*' 'vllm/_qutlass*' 'vllm/_deepsel*' \
  'vllm/third_party/*/cutlass/*' 'vllm/third_party/deep_gemm/*.so' 'vllm/third_party/deep_gemm/include/*' \
  'vllm/third_party/fmha*/c*'
cp "$here/no_flash_attention.py" "$folder/site/vllm/vllm_flash_attn/__init__.py"
"$python" "$here/keep_arch.py" "$folder/site/vllm/_C_stable_libtorch.abi3.so" 90
rm -rf "$folder/site/pycountry/locales" "$folder/site/bin" "$folder"/site/mistral_common/data/*.json
"$python" -m pip install --quiet --no-deps --no-build-isolation --target "$folder/own" "$root"
cp -r "$folder"/own/hwbackends-*.dist-info "$folder/site/" # entry points; the package itself is the tree's
tar c -C "$folder/site" . | xz -6 -T0 >"$folder/vllm-site.tar.xz"
ls -l "$folder/vllm-site.tar.xz"
