#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: tools/make_env.sh PYTHON DIRECTORY
#
# If PYTHON already has a suitable torch, the environment sees it and it is kept at its version (a
# CUDA build must not be replaced). Otherwise the torch that constraints.txt pins is installed.
set -euo pipefail

python=$1
directory=$2
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" - <<'CHECK' || { echo "error: PYTHON=$python: needs Python 3.11 or newer" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
CHECK

torch=$("$python" - <<'CHECK' 2>/dev/null || true
import torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11):
    print(torch.__version__)
CHECK
)

rm -rf "$directory"
if [ -n "$torch" ]; then
  echo "using torch $torch of $python"
  "$python" -m venv --system-site-packages "$directory"
  sed "s/^torch==.*/torch==$torch/" constraints.txt > "$directory/constraints.txt"
else
  echo "installing torch: $python has none that is 2.11 or newer"
  "$python" -m venv "$directory"
  cp constraints.txt "$directory/constraints.txt"
fi
if ! "$directory/bin/python" -m pip install --quiet --constraint "$directory/constraints.txt" torch --editable '.[dev]'; then
  echo "error: packages could not be installed; with no package index, use what the machine has:" >&2
  echo "  PYTHONPATH=src $python -m gradweave --help" >&2
  echo "  PYTHONPATH=src $python -m pytest" >&2
  rm -rf "$directory"
  exit 2
fi
touch "$directory/ready"
