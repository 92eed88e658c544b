#!/usr/bin/env bash
# Prints the path of a working Python 3.12, or says on stderr how to get one and exits with 1.
#
# "Working" means that it runs, is 3.12, and can make a virtual environment: a pyenv shim that only complains,
# or a Debian python3.12 without python3.12-venv, is passed over. PYTHON=/path/to/python overrides the search.
set -u

works() {
    [ -n "${1:-}" ] && command -v "$1" >/dev/null 2>&1 || return 1
    # the answer is compared, not the exit code alone: some stand-ins succeed at anything
    [ "$("$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' </dev/null 2>/dev/null)" = 3.12 ]
}

# A shim's own path is useless outside its folder's version settings: print the interpreter behind it.
found() {
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}

if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" && found "$PYTHON"
    echo "PYTHON=$PYTHON is not a working Python 3.12 with the venv module; correct it or unset it." >&2
    exit 1
fi

# every python3.12 on PATH, not only the first: a broken shim may hide a good one
while IFS= read -r candidate; do
    works "$candidate" && found "$candidate"
done < <(type -aP python3.12)

# newest patch release first; the glob stays literal, and fails the test, where there is none
while IFS= read -r candidate; do
    works "$candidate" && found "$candidate"
done < <(printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 | sort -rV)

if command -v uv >/dev/null 2>&1; then
    candidate=$(uv python find 3.12 2>/dev/null </dev/null) && works "$candidate" && found "$candidate"
fi

# a python3 that happens to be 3.12, and usual places that are not always on PATH
for candidate in python3 python /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/homebrew/bin/python3.12 \
    "$HOME/miniconda3/envs/"*/bin/python3.12 "$HOME/miniforge3/envs/"*/bin/python3.12; do
    works "$candidate" && found "$candidate"
done

cat >&2 <<'HELP'
No working Python 3.12 was found (looked on PATH, in ~/.pyenv/versions and with uv). Get one with any of
    uv python install 3.12
    pyenv install 3.12
    sudo apt install python3.12 python3.12-venv        (Ubuntu 24.04, Debian testing)
    conda create -n py312 python=3.12
or name one that you have: PYTHON=/path/to/python3.12 make ...
HELP
exit 1
