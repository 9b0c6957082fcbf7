#!/usr/bin/env bash
# Lowers the Ascend kernels with the vendor's compiler. Makes the environment for it where it is missing or old.
# Usage: tools/lowering/run.sh [arguments of lower.py]. PYTHON names a Python 3.11 (the compiler has wheels up to it).
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${ASCEND_VENV:-.venv-ascend}
made=$venv/.installed

if [[ ! -f $made || constraints-ascend.txt -nt $made ]]; then
  python=${PYTHON:-}
  for candidate in $python python3.11 python3 .venv/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 12))' 2>/dev/null; then
      python=$candidate
      break
    fi
    python=
  done
  [[ -n $python ]] || { echo "the lowering job needs Python 3.11: set PYTHON=/path/to/python3.11" >&2; exit 1; }
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --requirement constraints-ascend.txt
  touch "$made"
fi
unset TRITON_INTERPRET
exec "$venv/bin/python" tools/lowering/lower.py "$@"
