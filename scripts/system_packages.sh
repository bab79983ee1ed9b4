#!/usr/bin/env bash
# Debian packages that tests need and pip cannot bring: a real Slurm, a browser, Prometheus. `make test` calls it.
# As root on a Debian system it installs what is missing; elsewhere it says in one line what to install.
set -euo pipefail

missing=()
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}
need slurmctld slurmctld
need slurmd slurmd
need sbatch slurm-client
need munged munge
need chromium chromium
need prometheus prometheus
[ "${#missing[@]}" -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    printf 'test: these Debian packages are missing: %s. Install them, for example: sudo apt-get install %s\n' \
        "${missing[*]}" "${missing[*]}" >&2
    exit 1
fi
echo "test: Debian packages ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 || {
    printf 'test: apt-get could not install %s; its last line: %s\n' "${missing[*]}" "$(tail -n 1 "$log")" >&2
    exit 1
}
rm -f "$log"
