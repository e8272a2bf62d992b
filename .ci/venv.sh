#!/bin/sh
# Makes the virtual environment that `make` runs everything in.
#
#   sh .ci/venv.sh FOLDER EXTRAS [PIP OPTION...]
#
# Any folder of that name is replaced. PYTHON in the environment names the Python to use; without it
# the first one on the PATH that runs and is new enough is taken. Run from the repository root.
set -eu

needed="3.12"
names="python3.12 python3 python3.13 python3.14"
tried=""

# Says why $1 is no Python to build on; says nothing if it is one. It has to be run to know: a pyenv
# shim exists for every version that was ever installed, and fails for those not selected here.
fault() {
    "$1" - "$needed" 2>/dev/null <<'PY' || echo "does not run"
import sys
found = "%d.%d" % sys.version_info[:2]
if sys.version_info < tuple(map(int, sys.argv[1].split("."))):
    print("is Python " + found)
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("is Python %s without the venv module (on Debian and Ubuntu: apt install python%s-venv)" % (found, found))
PY
}

# Sets $python to $1 if that will do, else adds a line to $tried.
try() {
    why=$(fault "$1")
    if [ -z "$why" ]; then
        python=$1
    else
        tried="$tried
  $1 $why"
        return 1
    fi
}

# Every folder of the PATH is asked for a name, not only the first that has it: a shim that fails may
# hide a Python that works. Versions that pyenv has but does not select come last.
search() {
    for name in $names; do
        old_ifs=$IFS
        IFS=:
        for dir in $PATH; do
            IFS=$old_ifs
            if [ -x "${dir:-.}/$name" ] && try "${dir:-.}/$name"; then return 0; fi
        done
        IFS=$old_ifs
    done
    if command -v pyenv >/dev/null 2>&1; then
        for candidate in "$(pyenv root)"/versions/3.*/bin/python3; do
            if [ -x "$candidate" ] && try "$candidate"; then return 0; fi
        done
    fi
    return 1
}

complain() {
    cat >&2 <<TEXT
moe_pallas needs Python $needed or newer, with the venv module, and found none. Tried:${tried:-
  (there is no $(echo "$names" | sed 's/ /, /g; s/, \([^,]*\)$/ or \1/') on the PATH)}
Install one (python.org, your package manager, \`pyenv install $needed\`, \`uv python install $needed\`),
or name one that is not on the PATH: make ${MAKECMDGOALS:-test} PYTHON=/path/to/python$needed
TEXT
    exit 1
}

# An old driver would only make jax fail at start-up: without a GPU that it can use, stay on the CPU.
# CUDA 13 needs driver 580 (CUDA compatibility guide, minor version compatibility).
cuda_extra() {
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    case ${driver%%.*} in
    '' | *[!0-9]*) ;;
    *)
        if [ "${driver%%.*}" -ge 580 ]; then
            echo ",cuda"
        else
            echo "moe_pallas: NVIDIA driver $driver is too old for CUDA 13 (needs 580); installing for the CPU" >&2
        fi
        ;;
    esac
}

folder=$1
extras=$2
shift 2

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" || complain
else
    search || complain
fi

extras="$extras$(cuda_extra)"
echo "moe_pallas: making $folder with $python and installing .[$extras] (once, a minute or so)"
"$python" -m venv --clear "$folder"
# The pip that comes with a Python may be years old.
"$folder/bin/python" -m pip install --quiet --upgrade "$@" pip
"$folder/bin/python" -m pip install --quiet "$@" --editable ".[$extras]"
