#!/usr/bin/env bash
# All tests, in two processes side by side, since much of a test's time is one core's: whole runs and what wants most of the
# servers in the first, everything else that shares the resident workers in the second. The first one's output follows the
# second's. Arguments go to pytest; then one process runs what they select.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ $# -gt 0 ] && exec "$python" -m pytest "$@"

first=()
skipped=()
for folder in tests/system tests/engine tests/engines tests/weights tests/slurm; do
    [ -d "$folder" ] || continue
    first+=("$folder")
    skipped+=("--ignore=$folder")
done
log="$(mktemp)"
trap 'kill "$side" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
"$python" -m pytest "${first[@]}" >"$log" 2>&1 &
side=$!
"$python" -m pytest "${skipped[@]}"
rest=$?
echo "(waiting for ${first[*]})"
wait "$side"
runs=$?
printf '\n%s:\n' "${first[*]}"
cat "$log"
exit $((rest > runs ? rest : runs))
