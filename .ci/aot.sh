#!/bin/sh
# Puts the aot extra, JAX's CUDA plugin and ptxas, into the folder aot of a virtual environment.
#
#   sh .ci/aot.sh FOLDER [PIP OPTION...]
#
# Not into the environment itself: without a GPU the plugin would print a traceback whenever jax starts.
# Succeeds without the extra where it can't be had; the tests that need it say so. Run from the repository root.
set -eu

folder=$1
shift
rm -rf "$folder/aot"

# One line for each requirement; the plugin works with the jax of its own version only.
wanted=$("$folder/bin/python" - <<'PY'
import importlib.metadata, re, tomllib
with open("pyproject.toml", "rb") as file:
    extra = tomllib.load(file)["project"]["optional-dependencies"]["aot"]
for requirement in extra:
    name = re.match(r"[\w.-]+", requirement).group()
    print(name + "==" + importlib.metadata.version("jax") if name.startswith("jax-") else requirement)
PY
)

echo "moe_pallas: putting the compiler for NVIDIA GPUs into $folder/aot (once, 260 MB to download)"
# shellcheck disable=SC2086 # one word for each requirement
if "$folder/bin/python" -m pip install --quiet --target "$folder/aot" "$@" $wanted; then
    touch "$folder/aot/.made"
else
    rm -rf "$folder/aot"
    echo "moe_pallas: there is none for this machine, or no network; the tests marked aot will be skipped" >&2
fi
