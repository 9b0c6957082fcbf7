#!/usr/bin/env bash
# Puts SGLang and this checkout under $WORK and writes the environment of the runs into $WORK/env.sh. install.sh [FOLDER]:
# from a folder of pack.sh, for a machine without a network; without one, from the package index, in a fresh environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${WORK:=${TMPDIR:-/tmp}/engines-sglang}"
start=$SECONDS path=$here/probe python=
mkdir -p "$WORK"
if [[ -n ${1:-} ]]; then
  folder=$(cd "$1" && pwd) path=$WORK/site:$here/probe
  if [[ ! -e $WORK/site/.done ]]; then
    mkdir -p "$WORK/site"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" \
      "$folder"/whl/*.whl
    tar xzf "$folder/sglang.tar.gz" -C "$WORK/site"
    cp -r "$here/stand_ins/." "$WORK/site/"
    cp "$folder"/sgl_kernel/*.py "$WORK/site/sgl_kernel/"
    python3 -m compileall -q -j 16 "$WORK/site" >/dev/null 2>&1 || true
    touch "$WORK/site/.done"
  fi
else
  python=$WORK/venv/bin:
  if [[ ! -e $WORK/venv/.done ]]; then
    "${PYTHON:-python3}" -m venv "$WORK/venv"
    "$WORK/venv/bin/pip" install --quiet sglang==0.5.23
    "$WORK/venv/bin/pip" install --quiet "$here/../../.."
    touch "$WORK/venv/.done"
  fi
fi
for home in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-13.0 /usr/local/cuda-13; do
  [[ -n $home && -e $home/bin/nvcc && -e $home/lib64/libcudart.so ]] && break
done
cat >"$WORK/env.sh" <<X
export WORK=$WORK PYTHONPATH=$path CUDA_HOME=$home PATH=$python$home/bin:\$PATH PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK=1
export SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=1
export SGLANG_JIT_CACHE_DIR=$WORK/jit TRITON_CACHE_DIR=$WORK/triton TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
X
if [[ -n ${1:-} ]]; then
  # the stand-in of sglang-kernel, and the modules in Rust that do not travel
  echo "export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python" >>"$WORK/env.sh"
fi
. "$WORK/env.sh"
python3 "$here/models.py" "$WORK/models"
[[ -e $WORK/jit/.done ]] || { python3 "$here/prejit.py" | grep -E "FAILED|all in" || true; touch "$WORK/jit/.done"; }
echo "installed in $((SECONDS - start)) s"
