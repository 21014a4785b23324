#!/usr/bin/env bash
# Installs, builds and tests the project.
#
#   tests/run.sh          the release build; tests labelled `slow` are left out
#   tests/run.sh --python the same, and the Python package's tests, in a virtual environment in build/venv, with ruff
#                         and mypy. What needs PyTorch is skipped where it cannot be installed.
#   tests/run.sh --all    all tests, also the Python package's, in the release build and under the address,
#                         undefined-behaviour and thread sanitizers; clang-tidy's checks with Clang's thread-safety
#                         analysis; clang-format
#   tests/run.sh --full   all of that, and what is slow and rarely tells more: the tests labelled `full` (under the
#                         sanitizers, the enumerations and comparisons of numbers that the release build runs in any
#                         case); the Python package beside TensorFlow; clang-tidy on each source by itself and with Clang's static analyzer
#
# The last line is `N passed, N failed`, with `, N skipped` if any were, added up over all builds; the analysis and the
# format check count as a test each, and a build that fails as a failed one. Exit status: 0 if tests ran and none
# failed. Every phase's full output is in build/logs/.
#
# PS_DATA_DIR: the folder that holds mnist/, for the tests that want it. PS_START_DOCKER: a program that starts a Docker
# engine, for the test of the docker-compose demo, which is among the slow ones.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
readonly logs=$root/build/logs
readonly build_timeout_s=2400 test_timeout_s=1800 analysis_timeout_s=1800
readonly sources=(common server worker tests)

all=false full=false python=false
for argument in "$@"; do
  case "$argument" in
    --python) python=true ;;
    --all) all=true python=true ;;
    --full) all=true full=true python=true ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "tests/run.sh: unknown argument '$argument' (the options are --python, --all and --full)" >&2; exit 2 ;;
  esac
done

# Without it, ccache does not keep what is compiled with precompiled headers.
export CCACHE_SLOPPINESS=pch_defines,time_macros

# Several sources are compiled at a time, which takes half as long. On few processors 48 take less time again, and so does
# a GCC that need not collect its garbage: it takes up to 4 GiB of memory for them.
at_a_time=16 compiler_flags=${CXXFLAGS:-}
memory_kib=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || true)  # Of a container.
if [[ $limit =~ ^[0-9]+$ ]] && ((limit / 1024 < memory_kib)); then memory_kib=$((limit / 1024)); fi
if $all && [[ -z ${CXX:-} ]] && (($(nproc) <= 4 && memory_kib >= 4 * 1024 * 1024 * $(nproc))); then
  at_a_time=48 compiler_flags+=' --param ggc-min-expand=1000 --param ggc-min-heapsize=2000000'
fi
readonly at_a_time compiler_flags

passed=0 failed=0 skipped=0 phase_pid=
# stop STATUS: ends the phase that runs, with all that it started.
stop() {
  trap '' INT TERM HUP
  if [[ -n $phase_pid ]]; then
    kill "$phase_pid" 2>/dev/null || true
    wait "$phase_pid" 2>/dev/null || true
  fi
  printf 'interrupted\n'
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP
mkdir -p "$logs"

if [[ -z ${PS_DATA_DIR:-} && -d ../shared/data ]]; then
  PS_DATA_DIR=$(cd ../shared/data && pwd)
  export PS_DATA_DIR
fi
if [[ -z ${PS_START_DOCKER:-} && -x ../shared/tools/start-docker && $EUID == 0 ]]; then
  PS_START_DOCKER=$(cd ../shared/tools && pwd)/start-docker
  export PS_START_DOCKER
fi

# phase NAME TIMEOUT_S COMMAND...: runs it into a log of its own and prints one line. Returns its status.
phase() {
  local name=$1 limit=$2 status=0 began=$SECONDS
  shift 2
  log=$logs/$(tr -cs 'a-z\n' - <<<"$name").log
  printf '%-28s ' "$name"
  # A group of its own, which `timeout` ends as a whole: at the limit, or when the trap below ends `timeout`.
  timeout --kill-after=30 "$limit" "$@" >"$log" 2>&1 </dev/null &
  phase_pid=$!
  wait "$phase_pid" || status=$?
  phase_pid=
  local seconds=$((SECONDS - began)) shown=${log#"$root"/}
  if ((status == 0)); then
    printf 'ok      %5d s\n' "$seconds"
  elif ((seconds >= limit)); then
    printf 'TIMEOUT %5d s (limit %d s), log: %s\n' "$seconds" "$limit" "$shown"
  elif ((status > 128)); then
    printf 'KILLED  %5d s by signal %d, log: %s\n' "$seconds" $((status - 128)) "$shown"
  else
    printf 'FAILED  %5d s, log: %s\n' "$seconds" "$shown"
  fi
  return "$status"
}

# build PRESET: configures and builds it; a failure is shown and counted.
build() {
  local preset=$1 options=(-DPS_BUILD_TESTS=ON)
  # GCC warns of what is not there in code that it has instrumented.
  if [[ $preset == release ]]; then options+=(-DPS_WARNINGS_AS_ERRORS=ON); fi
  local together=(-DCMAKE_UNITY_BUILD=ON -DCMAKE_CXX_FLAGS="$compiler_flags")
  if [[ $preset != release ]]; then
    options+=("${together[@]}" -DCMAKE_UNITY_BUILD_BATCH_SIZE=$at_a_time)
  elif [[ ! -e build/CMakeCache.txt ]]; then  # The folder that somebody works in stays as it was configured.
    # Of more sources, optimised together, GCC 12 gives warnings that are wrong.
    options+=("${together[@]}" -DCMAKE_UNITY_BUILD_BATCH_SIZE=16)
  fi
  if command -v ccache >/dev/null; then
    options+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  if ! phase "$preset: configure" 300 cmake --preset "$preset" "${options[@]}"; then
    tail -n 40 "$log"
  elif ! phase "$preset: build" "$build_timeout_s" cmake --build --preset "$preset" --parallel "$(nproc)"; then
    # Ninja prints a failed command's output after this word; the rest is in the log.
    grep -A 40 -m 1 '^FAILED' "$log" || tail -n 40 "$log"
  else
    return 0
  fi
  failed=$((failed + 1))
  return 1
}

# run_tests PRESET FOLDER: adds its tests to the totals; shows what failed and what was skipped.
run_tests() {
  local preset=$1 folder=$2 report=$logs/$1-tests.xml options=() jobs
  jobs=$(($(nproc) + 1))  # Tests wait for a third of their time and more.
  if ! $all; then
    options=(-LE '^(slow|full)$')
  elif ! $full; then
    options=(-LE '^full$')
  fi
  rm -f "$report"
  local status=0
  phase "$preset: test" "$test_timeout_s" ctest --test-dir "$folder" -j "$jobs" --timeout 300 --output-junit "$report" \
    --test-output-size-passed 65536 --test-output-size-failed 1048576 --no-tests=error "${options[@]}" || status=$?
  add_report "$report" "$status"
}

# add_report REPORT STATUS: adds a JUnit file to the totals; STATUS is that of the program that wrote it.
add_report() {
  local report=$1 status=$2 summary counts
  if ! summary=$(python3 tests/junit_summary.py "$report" 2>&1); then
    tail -n 20 "$log"
    failed=$((failed + 1))
    return
  fi
  if [[ $summary == *$'\n'* ]]; then printf '%s\n' "${summary%$'\n'*}"; fi
  read -r -a counts <<<"${summary##*$'\n'}"
  # The program itself may fail (no tests at all, the limit) with no single test to blame.
  if ((status != 0 && counts[1] == 0)); then counts[1]=1; tail -n 20 "$log"; fi
  passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
}

# run_python: the Python package, built into the release build's folder.
run_python() {
  local venv=$root/build/venv report=$logs/python-tests.xml status=0 torch=true
  if ! phase "python: install" 600 deploy/install-deps.sh --python --venv="$venv"; then
    tail -n 20 "$log"
    failed=$((failed + 1))
    return
  fi
  if ! phase "python: install PyTorch" 900 "$venv/bin/pip" install --quiet 'torch>=2.1'; then
    tail -n 3 "$log"
    echo "skipped: what needs PyTorch, and mypy: it could not be installed"
    skipped=$((skipped + 1))
    torch=false
  fi
  # Its libraries are visible to all that is loaded later; one more look at how ours get on with them.
  if $full && ! phase "python: install TensorFlow" 900 "$venv/bin/pip" install --quiet tensorflow-cpu; then
    tail -n 3 "$log"
    echo "skipped: what needs TensorFlow: it could not be installed"
    skipped=$((skipped + 1))
  fi
  local options=(-DPS_BUILD_PYTHON=ON -DPython_EXECUTABLE="$venv/bin/python")
  local targets=(psgrad_core ps_server ps_ctl ps_worker)
  if ! phase "python: configure" 300 cmake --preset release "${options[@]}" ||
    ! phase "python: build" "$build_timeout_s" cmake --build build --target "${targets[@]}"; then
    tail -n 40 "$log"
    failed=$((failed + 1))
    return
  fi
  rm -f "$report"
  PYTHONPATH=$root/build/python PSGRAD_BIN=$root/build/bin phase "python: test" "$test_timeout_s" \
    "$venv/bin/python" -m pytest tests/python -p no:cacheprovider --junitxml="$report" || status=$?
  add_report "$report" "$status"
  check "ruff" "$venv/bin/ruff" check --no-cache python tests/python deploy/compare deploy/experiments tests/compare tests/experiments tests/fault
  check "ruff format" "$venv/bin/ruff" format --no-cache --check python tests/python deploy/compare deploy/experiments tests/compare tests/experiments tests/fault
  if $torch; then
    check "mypy" "$venv/bin/mypy" --cache-dir=/dev/null python/psgrad
    PSGRAD_BIN=$root/build/bin check "compare beside PyTorch" \
      "$venv/bin/python" -B -m unittest discover -s tests/compare -p test_pytorch_reference.py
  fi
}

# show_findings: what a check found, from its log; of wrongly formatted files the names.
show_findings() {
  if grep -q 'Wclang-format-violations' "$log"; then
    echo "to be formatted (clang-format -i):"
    sed -n 's/^\([^:]*\):.*Wclang-format-violations.*/    \1/p' "$log" | sort -u
  else
    # A finding in a header comes once for every file that includes it.
    { grep -E '(error|warning): ' "$log" || tail -n 20 "$log"; } | sort -u | head -n 60
  fi
}

# check NAME COMMAND...: a check over the sources, counted as one test.
check() {
  local name=$1
  shift
  if phase "$name" "$analysis_timeout_s" "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    show_findings
  fi
}

# compiled_sources FOLDER: the project's own files in its compile commands, and CMake's that include several of them,
# each once, ended by NUL.
compiled_sources() {
  python3 - "$1/compile_commands.json" "$root" "${sources[@]}" <<'PYTHON'
import json, os, sys
commands, root, *folders = sys.argv[1:]
own = tuple(os.path.join(root, folder, "") for folder in folders)
files = {os.path.normpath(os.path.join(c["directory"], c["file"])) for c in json.load(open(commands))}
sys.stdout.write("".join(f + "\0" for f in sorted(files)
                         if "/Unity/" in f or (f.startswith(own) and f.endswith(".cc"))))
PYTHON
}

# analyse: clang-tidy reads headers for far longer than sources, so --all lets it read several sources at once. That
# hides a source that does not include what it uses, and leaves the static analyzer, which takes half of the time, with
# nothing to do: both are for --full.
analyse() {
  local unity=(-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=$at_a_time) options=()
  if $full; then
    unity=(-DCMAKE_UNITY_BUILD=OFF)
  else
    options=(--header-filter='/(common|server|worker|tests)/[^:]*\.(h|cuh|cc)$'
             --checks='-clang-analyzer-*,-bugprone-suspicious-include')
  fi
  if ! command -v clang-tidy >/dev/null; then
    echo "skipped: clang-tidy and thread-safety analysis: clang-tidy is not installed"
    skipped=$((skipped + 1))
  # Without precompiled headers, which are GCC's.
  elif phase "analysis: configure" 300 cmake --preset release -B build-analysis -DPS_PRECOMPILED_HEADERS=OFF \
    "${unity[@]}" &&
    phase "analysis: generate" 300 cmake --build build-analysis --target ps_proto --parallel "$(nproc)"; then
    compiled_sources build-analysis >"$logs/sources"
    # The compile commands are GCC's; what only GCC knows is no finding.
    check "clang-tidy, thread safety" xargs -0 -a "$logs/sources" -n 1 -P "$(nproc)" \
      clang-tidy -p build-analysis --quiet "${options[@]}" \
      --extra-arg=-Wthread-safety --extra-arg=-Wno-unknown-warning-option
  else
    tail -n 40 "$log"
    failed=$((failed + 1))
  fi
}

check_format() {
  if ! command -v clang-format >/dev/null; then
    echo "skipped: clang-format: it is not installed"
    skipped=$((skipped + 1))
  else
    find "${sources[@]}" python -type f -regex '.*\.\(h\|cc\|cu\|cuh\)' -print0 >"$logs/files"
    check "clang-format" xargs -0 -a "$logs/files" clang-format --dry-run --Werror
  fi
}

# finish: the totals, alone on the last line. Returns 1 if they are no success.
finish() {
  printf '%d passed, %d failed' "$passed" "$failed"
  if ((skipped > 0)); then printf ', %d skipped' "$skipped"; fi
  printf '\n'
  ((failed == 0 && passed > 0))
}

install=(deploy/install-deps.sh)
if $all; then install+=(--dev --plots); fi
if $python; then install+=(--python); fi
if ! phase "install" 2400 "${install[@]}"; then
  tail -n 20 "$log"
  failed=1
  finish || exit 1
fi
if $all; then check_format; fi
if build release; then
  run_tests release build
  if $python; then run_python; fi
fi
if $all; then
  if build asan; then
    ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
      run_tests asan build-asan
  fi
  if build tsan; then
    TSAN_OPTIONS="suppressions='$root/tests/tsan.supp':ignore_noninstrumented_modules=1:second_deadlock_stack=1" \
      run_tests tsan build-tsan
  fi
  analyse
fi
finish
