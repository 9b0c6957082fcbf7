#!/usr/bin/env bash
# Proves the engines' plugins inside served engines on this machine's GPU, and measures them against stock.
# Usage: tools/engines_gpu.sh [sglang] [vllm]; all without a name. Results go to OUT (benchmarks/results/engines-gpu).
# Each engine's part is engine_tests/gpu/NAME/run.sh; on a GPU without a network it takes the archive that pack.sh beside
# it has made (SITE=archive).
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-$PWD/benchmarks/results/engines-gpu}
mkdir -p "$OUT"
if [[ $# -eq 0 ]]; then
  for part in engine_tests/gpu/*/run.sh; do set -- "$@" "$(basename "$(dirname "$part")")"; done
fi
for engine in "$@"; do
  bash "engine_tests/gpu/$engine/run.sh"
done
