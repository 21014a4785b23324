#!/usr/bin/env bash
# Runs experiments and writes a page of each, with its table and plots.
#
#   deploy/experiments.sh NAME… [--quick] [--no-build] [--FLAG=VALUE …]    --help lists names and flags
#   deploy/experiments.sh all    all of them, and a page that lists them
#
# On a fresh Debian 12: as root or with sudo, for the packages, unless --no-build says that all is there. What a machine
# lacks for a part (root for network namespaces, MPI, PyTorch in --python's interpreter, a GPU) is said on the page.
# Pages are in runs/experiments/full/pages, or quick/pages. The same command goes on where it was stopped;
# --fresh begins anew. Exit status: 0 done, 1 failed, 2 wrong flags, 130 interrupted.
set -euo pipefail

readonly BUILD_LIMIT_S=3600

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

fail() {
  printf 'experiments: %s\n' "$1" >&2
  exit "${2:-1}"
}
trap 'fail "stopped before anything was begun" 130' INT

arguments=()
to_build=1
packages=(--plots)
for argument in "$@"; do
  case $argument in
    links | all)
      arguments+=("$argument")
      if ((EUID == 0)); then packages+=(--mpi); fi  # Links need root, and MPI nothing else.
      ;;
    --no-build) to_build=0 ;;
    --help | -h) to_build=0 arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done

# In the foreground: Ctrl-C ends it too.
limited() { timeout --foreground --kill-after=10 "$BUILD_LIMIT_S" "$@"; }

# Only where CMake has found MPI there is its program.
targets() {
  printf '%s\n' ps_server ps_worker ps_bench
  cmake --build --preset release --target help | grep -oE '^ps_bench_mpi\b' | head -n 1 || true
}

build() {
  local log=$root/build/experiments-build.log options=() wanted=()
  mkdir -p "$root/build"
  if command -v ccache >/dev/null; then
    options=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  printf 'experiments: building\n' >&2
  if ! (cd "$root" && limited cmake --preset release "${options[@]}" &&
    mapfile -t wanted < <(targets) &&
    limited cmake --build --preset release --parallel "$(nproc)" --target "${wanted[@]}") >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "the build failed (last lines of $log above)"
  fi
}

if ((to_build)); then
  bash "$root/deploy/install-deps.sh" "${packages[@]}" >&2 || fail "the packages could not be installed"
  build
fi

# The packages bring Matplotlib to the system's Python, which need not be the one that is found first.
python=python3
has_matplotlib() { "$1" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("matplotlib") is None)' 2>/dev/null; }
if ! has_matplotlib python3 && has_matplotlib /usr/bin/python3; then python=/usr/bin/python3; fi
command -v "$python" >/dev/null || fail "python3 is missing; run without --no-build to install it"
PYTHONPATH=$root exec "$python" -B -m experiments "${arguments[@]}"
