#!/usr/bin/env bash
# SGLang's plugin inside served engines on this machine's GPU. Results in OUT, logs and raw answers in WORK.
#   STEPS   of tokens (stock against plugin over small models), server (launch_server and the OpenAI client) and speed (a
#           decoder stack with published layer sizes, one engine at a time); all by default
#   SITE    a folder of pack.sh, on a machine without a network; otherwise a fresh environment under WORK
#   RUNS    the engines of tokens or speed, where not all are wanted; PARALLEL of tokens run side by side
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${OUT:=$here/../../../benchmarks/results/engines-gpu}" "${WORK:=${TMPDIR:-/tmp}/engines-sglang}"
export WORK
mkdir -p "$OUT" "$WORK/runs"
bash "$here/install.sh" "${SITE:-}" || exit 1
. "$WORK/env.sh"
out=$WORK/runs failed=0
{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import torch, triton, transformers as t; print("torch", torch.__version__, "triton", triton.__version__, "transformers", t.__version__)'
  cat "${SITE:-.}/commit" 2>/dev/null || git -C "$here" describe --always --dirty --abbrev=12
} >"$OUT/sglang-where.txt" 2>/dev/null

one() { # one SCRIPT NAME: one engine in a process of its own
  local at=$SECONDS side=${2%%_*}
  [[ $side == ours ]] && export HWBACKENDS_SGLANG=1 || export HWBACKENDS_SGLANG=0
  export PROBE=$WORK/probe_$1_$2
  rm -f "$PROBE".*
  [[ $1 == serve && $2 == *mtp* ]] && export PROBE_ACCEPTED=1 || unset PROBE_ACCEPTED
  [[ $1 == speed ]] && export PROBE_WEIGHTS=0 || unset PROBE_WEIGHTS
  if ! timeout "${LIMIT:-240}" python3 "$here/$1.py" "$2" "$out" >"$out/$1_$2.log" 2>&1; then
    echo "$1 $2 FAILED"
    grep -vE "Warning|warnings.warn" "$out/$1_$2.log" | tail -"${TAIL:-25}" | cut -c1-240
  fi
  grep -hE "hwbackends:" "$out/$1_$2.log" | tail -1 | cut -c1-200
  echo "$1 $2: $((SECONDS - at)) s"
}

tokens() {
  local model graphs name runs=
  for model in inkling_plain inkling_mtp lfm2_plain; do
    for graphs in graph eager; do runs+=" stock_${model}_$graphs ours_${model}_$graphs"; done
  done
  for name in ${RUNS:-$runs}; do
    while (($(jobs -rp | wc -l) >= ${PARALLEL:-6})); do wait -n; done
    one serve "$name" &
    sleep 3
  done
  wait
  python3 "$here/compare.py" "$out" "$OUT/sglang-tokens.json"
}

server() {
  export HWBACKENDS_SGLANG=1 PROBE=$WORK/probe_server
  rm -f "$PROBE".*
  timeout "${LIMIT:-240}" python3 "$here/server.py" "$out" && cp "$out/server.json" "$OUT/sglang-server.json" && return
  grep -vE "Warning|warnings.warn" "$out/server.log" | tail -"${TAIL:-25}" | cut -c1-240
  return 1
}

speed() {
  local name
  for name in ${RUNS:-stock_inkling_plain_graph ours_inkling_plain_graph stock_inkling_mtp_graph ours_inkling_mtp_graph}; do
    one speed "$name"
  done
  python3 "$here/compare.py" "$out" "$OUT/sglang-speed.json"
}

for step in ${STEPS:-tokens server speed}; do "$step" || failed=1; done
exit $failed
