#!/bin/sh
# Builds the wheel and the sdist, and tries both in environments that have nothing else:
#
#   sh .ci/package.sh PYTHON [PIP OPTION...]
#
# the wheel without extras with README's first example, the sdist with extras with the decode loop. Nothing is
# left behind. Run from the repository root.
set -eu

python=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Makes the environment $1 and installs the rest of the arguments there.
install() {
    folder=$1
    shift
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

install "$work/build" "$@" build
"$work/build/bin/python" -m build --outdir "$work/dist" . >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
mkdir "$work/source"
tar -xzf "$work"/dist/*.tar.gz -C "$work/source"
source=$(echo "$work"/source/*)

# Code, py.typed and data: whatever lies in the package here lies in the wheel and in the sdist.
"$python" - "$work"/dist/*.whl "$source" <<'PY'
import pathlib, sys, zipfile
wheel, source = sys.argv[1:]
here = {str(path) for path in pathlib.Path("moe_pallas").rglob("*") if path.is_file() and path.suffix != ".pyc"}
lost = {
    "the wheel": here - set(zipfile.ZipFile(wheel).namelist()),
    "the sdist": {path for path in here if not pathlib.Path(source, path).is_file()},
}
for name, paths in lost.items():
    if paths:
        sys.exit(f"moe_pallas: {name} lacks {', '.join(sorted(paths))}")
print(f"moe_pallas: wheel and sdist hold the package's {len(here)} files")
PY

echo "moe_pallas: the wheel without extras runs README's first example"
install "$work/bare" "$@" "$work"/dist/*.whl
# -I: the installed package, not the one of this folder.
"$work/bare/bin/python" -I - "$source/README.md" <<'PY'
import re, sys
exec(re.search(r"```python\n(.*?)```", open(sys.argv[1], encoding="utf-8").read(), re.DOTALL)[1])
PY

echo "moe_pallas: the sdist with extras runs the decode loop, and its Flax modules import"
install "$work/full" "$@" "$(echo "$work"/dist/*.tar.gz)[checkpoints,flax,examples]"
"$work/full/bin/python" -I -c "import moe_pallas.flax_linen, moe_pallas.flax_nnx, moe_pallas.interop"
"$work/full/bin/python" "$source/examples/decode_loop.py" --max_new_tokens 8
