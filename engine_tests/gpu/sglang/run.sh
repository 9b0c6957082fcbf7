#!/usr/bin/env bash
# On the machine with the GPU: run.sh FOLDER OUT WHAT..., FOLDER from prepare.sh, OUT for the results, WHAT of
#   tokens   stock against plugin over small models (serve.py), four engines at a time, and their comparison
#   server   launch_server with the plugin and the OpenAI client (server.py)
#   speed    a decoder stack with published layer sizes, one engine at a time (speed.py)
# RUNS names the engines of tokens and speed, where not all are wanted.
set -uo pipefail
folder=$1 out=$2
shift 2
mkdir -p "$out"
bash "$folder/tests/install.sh" "$folder" || exit 1
. "${SITE:=${TMPDIR:-/tmp}/engines-sglang}/env.sh"
here=$folder/tests
cp "$folder/commit" "$out/commit" 2>/dev/null
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >"$out/device" 2>/dev/null
python3 -c 'import torch, triton, transformers; print("torch", torch.__version__, "triton", triton.__version__, "transformers", transformers.__version__)' >"$out/versions"
failed=0

one() { # one SCRIPT NAME: one engine in a process of its own, its log beside its results
  local at=$SECONDS side=${2%%_*}
  [[ $side == ours ]] && export HWBACKENDS_SGLANG=1 || export HWBACKENDS_SGLANG=0
  export PROBE=$SITE/probe_$1_$2
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

for what in "$@"; do
  case $what in
    tokens)
      : "${RUNS:=$(for model in inkling_plain inkling_mtp lfm2_plain; do for g in graph eager; do echo "stock_${model}_$g ours_${model}_$g"; done; done)}"
      for name in $RUNS; do
        while (($(jobs -rp | wc -l) >= ${PARALLEL:-6})); do wait -n; done
        one serve "$name" &
        sleep 3
      done
      wait
      python3 "$here/compare.py" "$out" || failed=1
      ;;
    server)
      export HWBACKENDS_SGLANG=1 PROBE=$SITE/probe_server
      rm -f "$PROBE".*
      timeout "${LIMIT:-240}" python3 "$here/server.py" "$out" ${SERVER_ARGS:-} || { failed=1; grep -vE "Warning|warnings.warn" "$out/server.log" | tail -25 | cut -c1-240; }
      ;;
    speed)
      for name in ${SPEED_RUNS:-stock_inkling_plain_graph ours_inkling_plain_graph stock_inkling_mtp_graph ours_inkling_mtp_graph}; do
        one speed "$name"
      done
      ;;
  esac
done
tar czf "$out/logs.tar.gz" -C "$out" $(cd "$out" && ls ./*.log) && rm -f "$out"/*.log
exit $failed
