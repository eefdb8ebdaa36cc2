# Sourced by quickstart.sh and test.sh. `setup EXTRA` finds or makes a virtual environment, installs
# ds4d with that extra from constraints.txt unless that is done, and sets $python to its Python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    printf 'ds4d: %s\n' "$@" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# The Python of the active virtual environment, else of .venv, which is made if it is not there.
find_python() {
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        python=$VIRTUAL_ENV/bin/python
        is_new_enough "$python" ||
            die "the active virtual environment $VIRTUAL_ENV has no Python 3.11 or newer"
        return
    fi
    python=$root/.venv/bin/python
    "$python" -m pip --version >/dev/null 2>&1 && return
    local base
    for base in python3 python3.13 python3.12 python3.11 python; do
        is_new_enough "$base" && break
        base=
    done
    [ -n "$base" ] || die "Python 3.11 or newer is needed, and none is on PATH ($PATH)"
    "$base" -c 'import ensurepip, venv' 2>/dev/null || die \
        "$(command -v "$base") cannot make virtual environments: its venv module is missing." \
        "Install it (Debian, Ubuntu: apt install python3-venv), or activate a virtual environment" \
        "that you made some other way (virtualenv, uv), and run this again."
    echo "making the virtual environment $root/.venv"
    "$base" -m venv "$root/.venv"
}

setup() {
    local extra=$1 done_file state
    find_python
    done_file=$(dirname "$python")/../.ds4d-$extra
    state="$root $(cd "$root" && cat constraints.txt setup.cfg pyproject.toml | cksum)"
    if [ "$(cat "$done_file" 2>/dev/null)" = "$state" ] && is_installed; then return; fi
    echo "installing ds4d and what it needs for $python (minutes, once)"
    (cd "$root" && "$python" -m pip install -qq --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extra]")
    echo "$state" >"$done_file" || true
}

is_installed() {
    "$python" -c 'import importlib.metadata as m
for package in "ds4d", "torch", "deepspeed":
    m.version(package)' 2>/dev/null
}
