#!/usr/bin/env bash
# Compares synchronous and asynchronous training on this machine: one job under several modes and conditions, with
# several seeds, and a report of what each gains and costs.
#
#   deploy/compare.sh [--no-build] [--FLAG=VALUE …]    deploy/compare.sh --help lists the flags
#   deploy/compare.sh report OUTPUT                    writes the report of a comparison anew
#
# On a fresh Debian 12: as root or with sudo, for the packages, unless --no-build says that all is there. Exit status: 0
# all runs are made, also where some diverged or did not learn; 1 one failed or timed out, or nothing could be run; 2
# wrong flags; 130 interrupted (143 by SIGTERM). The same command goes on, and makes what failed again.
set -euo pipefail

readonly BUILD_LIMIT_S=3600

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

fail() {
  printf 'compare: %s\n' "$1" >&2
  exit "${2:-1}"
}
trap 'fail "stopped before anything was begun" 130' INT

# The packages bring matplotlib to the system's Python, which need not be the one that is found first.
python=python3
has_matplotlib() { "$1" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("matplotlib") is None)' 2>/dev/null; }
if ! has_matplotlib python3 && has_matplotlib /usr/bin/python3; then python=/usr/bin/python3; fi

run() { exec "$python" -B "$root/experiments/compare/__main__.py" "$@"; }

# In the foreground: Ctrl-C ends it too.
limited() { timeout --foreground --kill-after=10 "$BUILD_LIMIT_S" "$@"; }

build() {
  local log=$root/build/compare-build.log
  mkdir -p "$root/build"
  printf 'compare: building\n' >&2
  if ! (cd "$root" && limited cmake --preset release &&
    limited cmake --build --preset release --parallel "$(nproc)" --target ps_server ps_worker ps_ctl) \
    >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "the build failed (last lines of $log above)"
  fi
}

arguments=()
to_build=1
for argument in "$@"; do
  case $argument in
    --no-build) to_build=0 ;;
    --help | -h) to_build=0 arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done
if [[ ${arguments[0]:-} == report ]]; then to_build=0; fi

if ((to_build)); then
  # What is wrong with the flags is better said before the build than after it.
  if command -v python3 >/dev/null; then python3 -B "$root/experiments/compare" --check "${arguments[@]}"; fi
  bash "$root/deploy/install-deps.sh" >&2 || fail "the packages could not be installed"
  build
fi
command -v python3 >/dev/null || fail "python3 is missing; run without --no-build to install it"
run "${arguments[@]}"
