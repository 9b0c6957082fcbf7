#!/usr/bin/env bash
# vLLM's part of tools/engines_gpu.sh: tokens, then `vllm serve`, then the speed table. STEPS chooses among the three.
# Without SITE an environment is made here and vLLM installed into it; SITE names an archive made by pack.sh, which is
# unpacked in front of the packages of PYTHON (torch with CUDA, transformers).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${OUT:-$root/benchmarks/results/engines-gpu}
work=${WORK:-$(mktemp -d)}
mkdir -p "$out" "$work"
if [[ -n "${SITE:-}" ]]; then
  python=${PYTHON:-python3}
  if [[ ! -e $work/site/vllm ]]; then
    mkdir -p "$work/site"
    tar xJf "$SITE" -C "$work/site" --no-same-owner
  fi
  export PYTHONPATH=$work/site:$root HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
else
  python=$root/.venv-vllm-gpu/bin/python
  if [[ ! -x $python ]]; then
    "${PYTHON:-python3}" -m venv "$root/.venv-vllm-gpu"
    "$python" -m pip install --quiet vllm==0.32.0 hatchling
    "$python" -m pip install --quiet --no-build-isolation --editable "$root[cuda]"
  fi
fi
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
steps=${STEPS:-tokens served speed}
[[ -e $work/tiny/expected.json ]] || "$python" "$root/engine_tests/vllm/tiny_lfm2.py" "$work/tiny"
cp -r "$work/tiny" "$work/tiny-served"
jobs=()
if [[ $steps == *tokens* ]]; then
  "$python" "$here/tokens.py" "$work/tiny" "$out/vllm-tokens.json" --graphs >"$work/tokens.out" 2>&1 &
  jobs+=($!)
fi
if [[ $steps == *served* ]]; then
  graphs='{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 7]}'
  "$python" "$here/served.py" "$work/tiny-served" "$work/served.log" --attention-backend TRITON_ATTN \
    --gpu-memory-utilization 0.05 --kv-cache-memory-bytes 268435456 --compilation-config "$graphs" \
    >"$work/served.out" 2>&1 &
  jobs+=($!)
fi
failed=0
for job in ${jobs[@]+"${jobs[@]}"}; do
  wait "$job" || failed=1
done
for part in tokens served; do
  [[ ! -e $work/$part.out ]] || { echo "== $part"; tail -n 40 "$work/$part.out" | cut -c1-900; }
done
if [[ $steps == *speed* ]]; then
  echo "== speed"
  "$python" "$here/speed.py" "$out/vllm-speed.json" --profile "$work/profiles" ${SPEED_ARGS:-} || failed=1
fi
exit $failed
