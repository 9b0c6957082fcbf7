#!/usr/bin/env bash
# Proves the SGLang plugin on a CPU in an environment of its own. Usage: tools/test_sglang.sh [pytest arguments]
# The environment is made anew unless KEEP=1; PYTHON names the interpreter (3.11 to 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
venv=.venv-sglang
if [[ "${KEEP:-0}" != 1 || ! -x $venv/bin/python ]]; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet -c constraints.txt torch triton
  # without its dependencies: they bring CUDA builds of everything, and pin another torch
  "$venv/bin/pip" install --quiet --no-deps sglang==0.5.23
  "$venv/bin/pip" install --quiet transformers==5.24.0 apache-tvm-ffi==0.1.11 \
    msgspec orjson pyzmq psutil requests fastapi uvicorn uvloop aiohttp einops pillow pybase64 ipython dill \
    loguru sentencepiece openai partial-json-parser compressed-tensors gguf setproctitle \
    pytest pluggy pyyaml click rich hatchling \
    2> >(grep -vE "^(sglang .* (requires|which)|ERROR: pip's dependency resolver)" >&2)  # as said: without them
fi
"$venv/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
installed=$((SECONDS - start))
HWBACKENDS_SGLANG=1 "$venv/bin/python" -m hwbackends doctor
"$venv/bin/python" -m pytest -c engine_tests/pytest.ini --rootdir . engine_tests/sglang "$@"
echo "SGLang $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("sglang"))'):" \
  "install ${installed} s, all $((SECONDS - start)) s"
