#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: tools/make_env.sh PYTHON DIRECTORY
#
# If PYTHON already has a suitable torch, the environment sees PYTHON's packages and that torch is
# left as it is (a CUDA build must not be replaced). Otherwise the torch that constraints.txt pins is
# installed.
set -euo pipefail

python=$1
directory=$2
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: PYTHON=$python: needs Python 3.11 or newer" >&2
  exit 2
}

# The folder that holds a torch of at least 2.11, pre-releases of 2.11 included; or nothing.
packages=$("$python" - <<'FIND' 2>/dev/null || true
import re
from pathlib import Path

import torch

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 11):
    print(Path(torch.__file__).parents[1])
FIND
)

give_up() {
  rm -rf "$directory"
  echo "error: packages could not be installed (pip says why above); with no package index, use what there is:" >&2
  echo "  PYTHONPATH=src $python -m gradweave --help" >&2
  echo "  PYTHONPATH=src $python -m pytest" >&2
  exit 2
}

rm -rf "$directory"
"$python" -m venv "$directory"
pip=("$directory/bin/python" -m pip install --quiet --constraint constraints.txt)
if [ -n "$packages" ]; then
  echo "using the torch in $packages"
  site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  echo "$packages" > "$site/packages_of_python.pth"
else
  echo "installing torch: $python has none that is 2.11 or newer"
  "${pip[@]}" torch || give_up
fi

# Everything but torch, which is settled, and the Triton that came with it; then the package itself, without asking again.
mapfile -t needed < <("$directory/bin/python" - <<'LIST'
import tomllib
from importlib.util import find_spec

settled = ("torch", "triton") if find_spec("triton") else ("torch",)
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
    if not requirement.startswith(settled):
        print(requirement)
LIST
)
"${pip[@]}" "${needed[@]}" || give_up
"${pip[@]}" --no-deps --editable . || give_up
touch "$directory/ready"
