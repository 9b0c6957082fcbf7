#!/usr/bin/env bash
# On the machine with the GPU: puts what prepare.sh gathered under $SITE and writes the environment of every run there.
# Usage: install.sh FOLDER
set -euo pipefail
folder=$(cd "$1" && pwd)
: "${SITE:=${TMPDIR:-/tmp}/engines-sglang}"
start=$SECONDS
if [[ ! -e $SITE/.done ]]; then
  mkdir -p "$SITE"
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$folder"/whl/*.whl
  tar xzf "$folder/sglang.tar.gz" -C "$SITE"
  cp -r "$folder/tests/site/." "$SITE/"
  cp "$folder"/sgl_kernel/*.py "$SITE/sgl_kernel/"
  python3 -m compileall -q -j 16 "$SITE" >/dev/null 2>&1 || true
  touch "$SITE/.done"
fi
for home in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-13.0 /usr/local/cuda-13; do
  [[ -n $home && -e $home/bin/nvcc && -e $home/lib64/libcudart.so ]] && break
done
cat >"$SITE/env.sh" <<X
export SITE=$SITE PYTHONPATH=$SITE CUDA_HOME=$home PATH=$home/bin:\$PATH PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK=1
export SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=1
export SGLANG_JIT_CACHE_DIR=$SITE/.jit TRITON_CACHE_DIR=$SITE/.triton TORCHINDUCTOR_CACHE_DIR=$SITE/.inductor
X
. "$SITE/env.sh"
python3 "$folder/tests/models.py" "$SITE/models"
[[ -e $SITE/.jit/.done ]] || { python3 "$folder/tests/prejit.py" | grep -E "FAILED|all in" || true; touch "$SITE/.jit/.done"; }
echo "installed in $((SECONDS - start)) s"
