#!/usr/bin/env bash
# Runs experiments, and the comparison of modes, and writes a page of each, with its tables and plots.
#
#   deploy/experiments.sh NAME… [--quick] [--no-build] [--FLAG=VALUE …]    --help lists names and flags
#   deploy/experiments.sh all             all of them, and a page that lists them
#   deploy/experiments.sh compare [...]   what deploy/compare.sh is the door of
#
# On a fresh Debian 12: as root or with sudo, for the packages, unless --no-build says that all is there. What a machine
# lacks for a part (root for network namespaces, MPI, PyTorch in --python's interpreter, a GPU) is said on the page.
# Pages are in runs/experiments/full/pages, or quick/pages. The same command goes on where it was stopped;
# --fresh begins anew. Exit status: 0 done, 1 failed, 2 wrong flags, 130 interrupted.
set -euo pipefail

readonly BUILD_LIMIT_S=3600

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

name=experiments
program=$root/experiments
targets=(ps_server ps_worker ps_bench)
if [[ ${1:-} == compare ]]; then
  name=compare
  program=$root/experiments/compare
  targets=(ps_server ps_worker ps_ctl)
  shift
fi

fail() {
  printf '%s: %s\n' "$name" "$1" >&2
  exit "${2:-1}"
}
trap 'fail "stopped before anything was begun" 130' INT

arguments=()
to_build=1
packages=(--plots)
for argument in "$@"; do
  case $argument in
    --no-build) to_build=0 ;;
    --help | -h) to_build=0 arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
  # Links need root, and MPI nothing else.
  if [[ $name == experiments && ($argument == links || $argument == all) ]] && ((EUID == 0)); then packages+=(--mpi); fi
done
if [[ $name == compare && ${arguments[0]:-} == report ]]; then to_build=0; fi

# In the foreground: Ctrl-C ends it too.
limited() { timeout --foreground --kill-after=10 "$BUILD_LIMIT_S" "$@"; }

build() {
  local log=$root/build/$name-build.log options=()
  mkdir -p "$root/build"
  if command -v ccache >/dev/null; then
    options=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  printf '%s: building\n' "$name" >&2
  if ! (cd "$root" && limited cmake --preset release "${options[@]}" &&
    # Only where CMake has found MPI there is its program.
    if [[ $name == experiments ]] && cmake --build --preset release --target help | grep -E '^ps_bench_mpi\b'; then
      targets+=(ps_bench_mpi)
    fi &&
    limited cmake --build --preset release --parallel "$(nproc)" --target "${targets[@]}") >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "the build failed (last lines of $log above)"
  fi
}

if ((to_build)); then
  # What is wrong with the flags is better said before the build than after it.
  if [[ $name == compare ]] && command -v python3 >/dev/null; then python3 -B "$program" --check "${arguments[@]}"; fi
  bash "$root/deploy/install-deps.sh" "${packages[@]}" >&2 || fail "the packages could not be installed"
  build
fi

# The packages are for the system's Python, which need not be the one that is found first.
python=python3
has_packages() {
  "$1" -c 'import sys
from importlib.util import find_spec
sys.exit(None in map(find_spec, ("jinja2", "matplotlib", "pandas", "scipy")))' 2>/dev/null
}
if ! has_packages python3 && has_packages /usr/bin/python3; then python=/usr/bin/python3; fi
command -v "$python" >/dev/null || fail "python3 is missing; run without --no-build to install it"
exec "$python" -B "$program" "${arguments[@]}"
