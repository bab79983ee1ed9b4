#!/usr/bin/env bash
# Run every program in benchmarks/ one after the other with the same arguments. All run even when one fails; then the exit code says so.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failed=()
ran=0
for file in benchmarks/*.py; do
    grep -q '^if __name__ == "__main__":' "$file" 2>/dev/null || continue # a helper, or no file at all
    name="$(basename "$file" .py)"
    ran=$((ran + 1))
    echo "== $name $*"
    .venv/bin/python -m "benchmarks.$name" "$@" || failed+=("$name")
done
[ "$ran" -gt 0 ] || { echo "bench: no program in benchmarks/" >&2; exit 1; }
[ "${#failed[@]}" -eq 0 ] || { echo "bench: failed: ${failed[*]}" >&2; exit 1; }
