#!/usr/bin/env bash
# Installs, builds and tests the project.
#
#   tests/run.sh          the release build, and its tests but for those labelled `long`, `slow` or `full`: jobs that lose
#                         programs, comparisons, searches through all orders
#   tests/run.sh --python the same, and the Python package's tests, in a virtual environment in build/venv, with ruff
#                         and mypy. What needs PyTorch is skipped where it cannot be installed.
#   tests/run.sh --see    the first, and what one sees of a job: its page in Chromium, its metrics in Prometheus, records. What
#                         needs a program that cannot be installed is skipped.
#   tests/run.sh --all    both of these, and what else continuous integration runs: tests labelled `long`, the demo before and
#                         after the tests, a small share of the slow ones, the address, undefined-behaviour and thread
#                         sanitizers over what is concurrent or decodes bytes, clang-tidy with Clang's thread-safety analysis
#                         over what tests/analysed.txt does not know, clang-format
#   tests/run.sh --full   all of that and all slow tests: once before a change is done. docs/developing.md has a table.
#
# A test that fails is run again by itself, at most twice. If it passes then, it counts as passed and is listed as unsteady at
# the end; its failed output is in build/logs. More than three unsteady tests are a failure. What a sanitizer reports, a crash,
# and a wrong hash or count are not run again.
#
# The last line is `N passed, N failed`, with `, N skipped` if any were, added up over all builds; the demo, the analysis and
# the format check count as a test each, and a build that fails as a failed one. Exit status: 0 if tests ran and none
# failed. Every phase's full output is in build/logs/.
#
# PS_DATA_DIR: the folder that holds mnist/, for the tests that want it. PS_START_DOCKER: a program that starts a Docker
# engine, for the test of the docker-compose demo, which is among the slow ones.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
readonly logs=$root/build/logs
readonly build_timeout_s=2400 analysis_timeout_s=1800
test_timeout_s=1800
readonly sources=(common server worker tests)

all=false full=false python=false see=false
for argument in "$@"; do
  case "$argument" in
    --python) python=true ;;
    --see) see=true ;;
    --all) all=true python=true see=true ;;
    --full) all=true full=true python=true see=true test_timeout_s=5400 ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "tests/run.sh: unknown argument '$argument' (the options are --python, --see, --all and --full)" >&2; exit 2 ;;
  esac
done

readonly unsteady_max=3
passed=0 failed=0 skipped=0 unsteady=0 phase_pid= python_pid=
# stop STATUS: ends the phase that runs, with all that it started.
stop() {
  trap '' INT TERM HUP
  local pid
  for pid in $phase_pid $python_pid; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  printf 'interrupted\n'
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP
mkdir -p "$logs"
: >"$logs/unsteady.txt"

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

# build PRESET TARGET [OPTION...]: configures and builds it; a failure is shown and counted. The configuration is the preset's
# and nothing else, so that whoever types the preset's name, the demo and this script share a folder. (Options that only
# choose what there is to build may differ.)
build() {
  local preset=$1 target=$2
  shift 2
  if ! phase "$preset: configure" 300 cmake --preset "$preset" "$@"; then
    tail -n 40 "$log"
  elif ! phase "$preset: build" "$build_timeout_s" cmake --build --preset "$preset" --target "$target" --parallel "$(nproc)"; then
    # Ninja prints a failed command's output after this word; the rest is in the log.
    grep -A 40 -m 1 '^FAILED' "$log" || tail -n 40 "$log"
  else
    return 0
  fi
  failed=$((failed + 1))
  return 1
}

# run_tests PRESET FOLDER: adds its tests to the totals; shows what failed, what was skipped and what is unsteady.
run_tests() {
  local preset=$1 folder=$2 report=$logs/$1-tests.xml options=() jobs
  jobs=$(($(nproc) * 2))  # Tests wait for half of their time.
  if ! $all; then
    options=(-LE '^(long|slow|full)$')
  elif ! $full; then
    options=(-LE '^(slow|full)$')
  fi
  local common=(ctest --test-dir "$folder" --timeout 300 --test-output-size-passed 65536
    --test-output-size-failed 1048576 --no-tests=error)
  rm -f "$report" "$report".again*
  local status=0 reports=("$report") numbers attempt
  phase "$preset: test" "$test_timeout_s" "${common[@]}" -j "$jobs" --output-junit "$report" "${options[@]}" || status=$?
  for attempt in 1 2; do
    numbers=$(python3 tests/results.py again "${reports[-1]}" "$folder/Testing/Temporary/LastTestsFailed.log" \
      2>/dev/null | paste -sd,) || true
    if [[ -z $numbers ]]; then break; fi
    phase "$preset: test again $attempt" "$test_timeout_s" "${common[@]}" -I "0,0,0,$numbers" \
      --output-junit "$report.again$attempt" || true
    if [[ ! -e $report.again$attempt ]]; then break; fi
    reports+=("$report.again$attempt")
  done
  add_reports "$status" 8 "${reports[@]}"
}

# add_reports STATUS USUAL REPORT...: adds the JUnit files of a run, and of the tests that were run again, to the totals.
# STATUS is that of the program that wrote the first report; USUAL is the status by which it says that tests failed.
add_reports() {
  local status=$1 usual=$2 summary counts
  shift 2
  if ! summary=$(python3 tests/results.py summary "$@" 2>&1); then
    tail -n 20 "$log"
    failed=$((failed + 1))
    return
  fi
  if [[ $summary == *$'\n'* ]]; then printf '%s\n' "${summary%$'\n'*}"; fi
  grep '^unsteady: ' <<<"$summary" >>"$logs/unsteady.txt" || true
  read -r -a counts <<<"${summary##*$'\n'}"
  # The program itself may fail (no tests at all, a crash, the limit), with no single test to blame.
  if ((status != 0 && (status != usual || counts[1] + counts[3] == 0))); then
    counts[1]=$((counts[1] + 1))
    echo "FAILED: the program that runs the tests ended with status $status"
    tail -n 20 "$log"
  fi
  passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
  unsteady=$((unsteady + counts[3]))
}

# start_venv: begins to install what the tests in Python need into build/venv, beside the release build's tests, which wait
# for half of their time. await_venv waits for it.
start_venv() {
  local options=(--python --venv=build/venv)
  if $see; then options+=(--see); fi
  rm -f "$logs/venv.status" "$logs/torch.status"
  timeout --kill-after=30 1500 bash -c '
    logs=$1 python=$2
    shift 2
    deploy/install-deps.sh "$@" >"$logs/venv.log" 2>&1
    echo $? >"$logs/venv.status"
    if ! $python; then exit; fi
    build/venv/bin/pip install --quiet "torch>=2.1" >"$logs/torch.log" 2>&1
    echo $? >"$logs/torch.status"' start_venv "$logs" "$python" "${options[@]}" </dev/null &
  python_pid=$!
}

# installed NAME: waits for this part of what start_venv began. Returns its status; 1 if it did not come to it.
installed() {
  timeout 1500 tail --pid="$python_pid" -f /dev/null
  cat "$logs/$1.log"
  exit "$(cat "$logs/$1.status" 2>/dev/null || echo 1)"
}

# await_venv: returns 1, and counts a failure, if there is none.
await_venv() {
  export -f installed
  export logs python_pid
  if phase "python: install" 1500 bash -c 'installed venv'; then return 0; fi
  tail -n 20 "$log"
  failed=$((failed + 1))
  return 1
}

# run_pytest NAME FOLDER OPTION...: the tests of the folder, and again those that failed, added to the totals.
run_pytest() {
  local name=$1 folder=$2 report=$logs/$1-tests.xml status=0 attempt ids
  shift 2
  rm -f "$report" "$report".again*
  local pytest=("$root/build/venv/bin/python" -m pytest -p no:cacheprovider) reports=("$report")
  export PYTHONPATH=$root/build/python PSGRAD_BIN=$root/build/bin
  phase "$name: test" "$test_timeout_s" "${pytest[@]}" "$@" "$folder" --junitxml="$report" || status=$?
  for attempt in 1 2; do
    mapfile -t ids < <(python3 tests/results.py again "${reports[-1]}" 2>/dev/null)
    if ((${#ids[@]} == 0)); then break; fi
    phase "$name: test again $attempt" "$test_timeout_s" "${pytest[@]}" "${ids[@]}" \
      --junitxml="$report.again$attempt" || true
    reports+=("$report.again$attempt")
  done
  unset PYTHONPATH PSGRAD_BIN
  add_reports "$status" 1 "${reports[@]}"
}

# run_python: the Python package, built into the release build's folder.
run_python() {
  local venv=$root/build/venv torch=true
  if ! phase "python: install PyTorch" 60 bash -c 'installed torch'; then
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
  run_pytest python tests/python -n $(($(nproc) + 1)) --dist=worksteal
  if $torch; then
    check "mypy" "$venv/bin/mypy" --cache-dir=/dev/null python/psgrad
    PSGRAD_BIN=$root/build/bin PS_TORCH_PYTHON=$venv/bin/python check "compare beside PyTorch" \
      /usr/bin/python3 -B -m unittest discover -s tests/compare -p test_pytorch_reference.py
  fi
}

# check_python: the looks of what is written in Python.
check_python() {
  local ruff=$root/build/venv/bin/ruff
  local paths=(python tests/python tests/see experiments tests/compare tests/experiments tests/fault tests/*.py)
  check "ruff" "$ruff" check --no-cache "${paths[@]}"
  check "ruff format" "$ruff" format --no-cache --check "${paths[@]}"
}

# show_findings: what a check found, from its log; of wrongly formatted files the names.
show_findings() {
  if grep -q 'Wclang-format-violations' "$log"; then
    echo "to be formatted (clang-format -i):"
    sed -n 's/^\([^:]*\):.*Wclang-format-violations.*/    \1/p' "$log" | sort -u
  else
    # A finding in a header comes once for every file that includes it.
    { grep -E '(error|warning): ' "$log" || tail -n 20 "$log"; } | sort -u | sed -n 1,60p
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

# analyse: clang-tidy. --full reads each source by itself, with the static analyzer.
analyse() {
  local options=()
  if $full; then options=(--each); fi
  if ! command -v clang-tidy >/dev/null; then
    echo "skipped: clang-tidy and thread-safety analysis: clang-tidy is not installed"
    skipped=$((skipped + 1))
  # Without precompiled headers, which are GCC's. The compile commands are GCC's; what only GCC knows is no finding.
  elif phase "analysis: configure" 300 cmake --preset plain -B build-analysis -DPS_PRECOMPILED_HEADERS=OFF &&
    phase "analysis: generate" 300 cmake --build build-analysis --target ps_proto --parallel "$(nproc)"; then
    check "clang-tidy, thread safety" python3 -B tests/analysis.py build-analysis tests/analysed.txt "${options[@]}"
  else
    tail -n 40 "$log"
    failed=$((failed + 1))
  fi
}

# demo NAME: deploy/demo.sh as a newcomer runs it, but for one pass over the data.
demo() {
  check "$1" env EPOCHS=1 deploy/demo.sh
}

# demo_compiles_nothing: whatever was built for the tests is what the demo runs.
demo_compiles_nothing() {
  demo "demo after the tests"
  check "demo built nothing anew" bash -c '! grep -q "Building" build/demo-build.log'
}

# slow_share: what continuous integration runs of the slow tests: the docker-compose demo once, and five seeds of the chaos runs
# that differ from day to day.
slow_share() {
  local seed=$(($(date +%s) / 86400 * 5))
  check "compose demo" ctest --test-dir build -R '^compose_test' --no-tests=error --output-on-failure
  check "chaos, seeds $seed to $((seed + 4))" /usr/bin/python3 -B tests/fault/chaos build --seed="$seed" --runs=5
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
  cat "$logs/unsteady.txt"
  if ((unsteady > unsteady_max)); then
    printf '%d tests are unsteady; more than %d count as a failure\n' "$unsteady" "$unsteady_max"
    failed=$((failed + 1))
  fi
  printf '%d passed, %d failed' "$passed" "$failed"
  if ((skipped > 0)); then printf ', %d skipped' "$skipped"; fi
  printf '\n'
  ((failed == 0 && passed > 0))
}

install=(deploy/install-deps.sh)
if $all; then install+=(--dev --plots); fi
if $python || $see; then install+=(--python); fi
if $see; then install+=(--see); fi
if ! phase "install" 2400 "${install[@]}"; then
  tail -n 20 "$log"
  failed=1
  finish || exit 1
fi
if $all; then
  check_format
  demo "demo before the tests"
fi
if build release all; then
  if $python || $see; then start_venv; fi
  run_tests release build
  if $all; then demo_compiles_nothing; fi
  if $all && ! $full; then slow_share; fi
  if { $python || $see; } && await_venv; then
    if $python; then run_python; fi
    # A file's tests share a job, a Prometheus or a browser.
    if $see; then run_pytest see tests/see -n 2 --dist=loadfile; fi
    check_python
  fi
fi
if $all; then
  sanitized=OFF what=ps_tests
  if $full; then sanitized=ON what=all; fi
  if build asan $what -DPS_SANITIZE_EVERYTHING=$sanitized; then
    ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
      run_tests asan build-asan
  fi
  if build tsan $what -DPS_SANITIZE_EVERYTHING=$sanitized; then
    TSAN_OPTIONS="suppressions='$root/tests/tsan.supp':ignore_noninstrumented_modules=1:second_deadlock_stack=1" \
      run_tests tsan build-tsan
  fi
  analyse
fi
if $full; then
  build plain all && passed=$((passed + 1))  # Warnings that several sources at a time hide.
fi
finish
