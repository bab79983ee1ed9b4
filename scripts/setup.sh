#!/usr/bin/env bash
# Make .venv with exactly the locked packages and this project on top. `make setup` runs it when a lock has changed.
# PYTHON: the Python 3.11 to use. TORCH_INDEX: an index to take torch (and nothing else) from, e.g. one with the CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3.11}"
torch_index="${TORCH_INDEX:-}"
venv=.venv

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "this is $(uname -s) on $(uname -m); the locked packages exist for Linux on x86_64 only. Use such a machine or container."
command -v "$python" >/dev/null 2>&1 ||
    fail "no '$python' on PATH. Install Python 3.11 with its venv module, or name one: make setup PYTHON=path/to/python3.11"
found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || fail "'$python' does not start."
[ "$found" = 3.11 ] || fail "'$python' is Python $found; the locks are for 3.11. Name one: make setup PYTHON=path/to/python3.11"

if [ ! -x "$venv/bin/python" ]; then
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
        fail "'$python' cannot make a virtual environment. On Debian and Ubuntu install the package python3.11-venv."
fi

install() {
    "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --no-input --no-warn-script-location "$@"
}

torch_pin="$(grep '^torch==' requirements/cpu.txt)"
if [ -n "$torch_index" ]; then
    echo "setup: $torch_pin from the index that TORCH_INDEX names"
    install --no-deps --index-url "$torch_index" "$torch_pin"
fi
echo "setup: the locked packages (2.2 GB; a few minutes the first time)"
install -r requirements/cpu.txt -r requirements/dev.txt
install --no-deps -r requirements/cpu-nodeps.txt -r requirements/dev-nodeps.txt
# Containers often set PYTHONDONTWRITEBYTECODE: then nothing is compiled on first use either, and each of a run's ten
# processes would spend half its start on it. pip compiles on one core, and also what is never imported.
echo "setup: compiling"
"$venv/bin/python" -m compileall -q -j 0 -x '/(tests|multimodal_gen)/' \
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null 2>&1 || true  # some are templates
echo "setup: this project"
# setuptools warns at length that an editable install is editable
PYTHONWARNINGS=ignore install --no-deps --no-build-isolation --editable .
