#!/usr/bin/env bash
# All tests, in two processes side by side: engines take half a minute of one core to start, and the other core is free.
# Whole runs and tests of single servers go to the first, everything that shares the resident workers to the second. Each
# prints its own closing line; the first one's output follows the second's. Arguments select tests: then one process runs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
first=(tests/system tests/engine)
skipped=()
for folder in "${first[@]}"; do skipped+=("--ignore=$folder"); done
log="$(mktemp)"
trap 'kill "$side" 2>/dev/null; rm -f "$log"' EXIT
"$python" -m pytest "${first[@]}" >"$log" 2>&1 &
side=$!
"$python" -m pytest "${skipped[@]}"
rest=$?
wait "$side"
runs=$?
printf '\n%s:\n' "${first[*]}"
cat "$log"
exit $((rest > runs ? rest : runs))
