#!/usr/bin/env bash
# Makes .venv once, and installs into it whenever setup.py has changed since the last time.
#
# An environment that is already there is adopted, never made anew: when everything required is in it, the
# installation needs no network and takes seconds. Two calls at once wait for each other.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.installed
mkdir -p "$venv"

# the lock lies in the environment itself, which is never deleted here
if command -v flock >/dev/null 2>&1; then
    exec 9>>"$venv/.lock"
    if ! flock -n 9; then
        echo "waiting for another make that is setting up $venv ..." >&2
        flock 9
    fi
fi

fail() {
    echo "$1" >&2
    exit 1
}

python=$venv/bin/python
if [ ! -e "$python" ] && [ ! -L "$python" ]; then
    base=$(scripts/find_python.sh) || exit 1
    echo "making $venv with $base" >&2
    "$base" -m venv "$venv" || fail "python -m venv failed: see above."
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    fail "$venv holds no working Python 3.12 (was its base Python removed?): rm -r $venv, then try again."

# what decides whether an installation is needed: the requirements, the interpreter, and where this checkout lies
# (the editable installation and the console script hold its path)
wanted=$("$python" - <<'PY'
import hashlib, pathlib, sys
text = pathlib.Path("setup.py").read_text() + sys.version + str(pathlib.Path.cwd())
print(hashlib.sha256(text.encode()).hexdigest())
PY
)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/megatron-recover" ]; then
    exit 0
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
pip=("$python" -m pip install -e ".[dev]")
quiet=()
[ -t 2 ] || quiet=(--quiet --progress-bar off)

# all there already? then no index is asked, and setuptools of the environment builds the (editable) package
if "$python" -c 'import setuptools, torch, megatron.core.package_info' >/dev/null 2>&1 &&
    "${pip[@]}" --no-index --no-build-isolation --quiet >/dev/null 2>&1; then
    echo "$venv has everything that setup.py asks for" >&2
else
    echo "installing into $venv (PyTorch and Megatron: some gigabytes the first time) ..." >&2
    "${pip[@]}" ${quiet[@]+"${quiet[@]}"} >&2 || fail "pip could not install the requirements of setup.py: see above."
fi
echo "$wanted" >"$stamp"
