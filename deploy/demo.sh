#!/usr/bin/env bash
# Trains a small network on Fashion-MNIST with one parameter server and two workers on this machine, once with
# synchronous and once with asynchronous SGD, and compares the two runs in a table.
#
#   deploy/demo.sh
#
# On a fresh Debian 12: as root or with sudo, for the packages. Overrides, from the environment:
#   EPOCHS=10         passes over the training data, in each mode
#   WORKERS=2         worker processes
#   MODES="bsp asp"   modes to run, in this order
# While it trains, the page that it names shows how that goes, beside the runs before it.
# Logs and metrics: runs/demo-MODE/ (replaced if it is there). Exit status: 0 done, 1 failed, 130 interrupted.
set -euo pipefail

readonly EPOCHS=${EPOCHS:-10} WORKERS=${WORKERS:-2} MODES=${MODES:-bsp asp}

readonly BSP_LEARNING_RATE=0.05
# In asp every worker's push is an update of its own, where bsp makes one update of the mean of all N: N times as many
# updates on an N-th of the data each. So the learning rate is divided by N. docs/measured.md has what tuning finds.
ASP_LEARNING_RATE=$(awk -v rate="$BSP_LEARNING_RATE" -v workers="$WORKERS" 'BEGIN {print rate / workers}')
readonly ASP_LEARNING_RATE
readonly MODEL=mlp:784,256,128,10 BATCH_SIZE=64 EVAL_EVERY=0.25

readonly START_LIMIT_S=30   # For a server to listen.
readonly RUN_LIMIT_S=3600   # For one mode's training, and for the build.
readonly END_LIMIT_S=60     # For the server to end after its workers.
readonly STOP_LIMIT_S=10    # For a process to end after SIGTERM, before SIGKILL.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A name_of=() log_of=()  # Of each running child, by process id.
tail_pid=

say() { printf '%s\n' "$*" >&2; }

# start NAME LOG COMMAND...: runs it as a child that cannot outlive this script or RUN_LIMIT_S; sets `started`. Its
# stderr goes to LOG, its stdout to LOG with .out for .log.
start() {
  local name=$1 log=$2
  shift 2
  : >"$log"  # So that the files exist before the child opens them.
  : >"${log%.log}.out"
  # `timeout` passes a signal on to the command; the kernel sends it one if this script dies without a trap.
  setpriv --pdeathsig TERM timeout --kill-after="$STOP_LIMIT_S" "$RUN_LIMIT_S" "$@" \
    >"${log%.log}.out" 2>"$log" </dev/null &
  started=$!
  name_of[$started]=$name
  log_of[$started]=$log
}

stop_tail() {
  if [[ -n $tail_pid ]]; then
    kill "$tail_pid" 2>/dev/null || true
    wait "$tail_pid" 2>/dev/null || true
    tail_pid=
  fi
}

# Ends all children: SIGTERM, and SIGKILL after STOP_LIMIT_S.
stop_all() {
  stop_tail
  local pid deadline=$((SECONDS + STOP_LIMIT_S))
  for pid in "${!name_of[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${!name_of[@]}"; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
    # SIGKILL to `timeout` alone would leave its command; both are in the group that `timeout` leads.
    kill -KILL -- "-$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  name_of=() log_of=()
}

interrupted() {
  trap '' INT TERM HUP
  say "demo: interrupted; stopping ${#name_of[@]} processes"
  exit 130
}
trap stop_all EXIT
trap interrupted INT TERM HUP

# fail MESSAGE [LOG]: says what failed, with the end of its log, and ends; the trap stops the children.
fail() {
  stop_tail
  say "demo: $1"
  if [[ -n ${2:-} && -f $2 ]]; then
    say "demo: last lines of $2:"
    tail -n 15 "$2" | sed 's/^/    /' >&2
  fi
  exit 1
}

# reap PID: forgets a child that ended; fails unless its status is 0.
reap() {
  local name=${name_of[$1]} log=${log_of[$1]} status=0
  wait "$1" || status=$?
  unset "name_of[$1]" "log_of[$1]"
  case $status in
    0) ;;
    124) fail "$name timed out after $RUN_LIMIT_S s" "$log" ;;
    *)
      if ((status > 128)); then fail "$name was killed by signal $((status - 128))" "$log"; fi
      fail "$name failed with exit status $status" "$log"
      ;;
  esac
}

# wait_for_any LIMIT_S PID...: until one of them ends, which it reaps and names in `reaped`. Returns 1 at the limit.
wait_for_any() {
  local deadline=$((SECONDS + $1)) pid
  shift
  while ((SECONDS < deadline)); do
    for pid in "$@"; do
      if ! kill -0 "$pid" 2>/dev/null; then
        reaped=$pid
        reap "$pid"
        return
      fi
    done
    sleep 0.1
  done
  return 1
}

# wait_for_address PID OUT LOG: sets `address` and `page` to what the server's first two lines on stdout say.
wait_for_address() {
  local pid=$1 out=$2 log=$3 line second deadline=$((SECONDS + START_LIMIT_S))
  while ((SECONDS < deadline)); do
    # `read` fails on a line that is still being written.
    if { IFS= read -r line && IFS= read -r second; } <"$out"; then
      [[ $line == 'listening on '* && $second == 'page at '* ]] ||
        fail "the server says '$line' and '$second', expected 'listening on HOST:PORT' and 'page at URL'" "$log"
      address=${line#listening on } page=${second#page at }
      return
    fi
    if ! kill -0 "$pid" 2>/dev/null; then
      reap "$pid"
      fail "the server exited before it was listening" "$log"
    fi
    sleep 0.1
  done
  fail "the server was not listening within $START_LIMIT_S s" "$log"
}

learning_rate() {
  case $1 in
    bsp | sync | backup | local_sgd | diloco | easgd) echo "$BSP_LEARNING_RATE" ;;
    *) echo "$ASP_LEARNING_RATE" ;;
  esac
}

# train MODE FOLDER: one server and its workers, from start to end.
train() {
  local mode=$1 folder=$2 rate rank server_pid running=()
  local -A workers=()
  rate=$(learning_rate "$mode")
  rm -rf "$folder"
  mkdir -p "$folder"
  say "demo: $mode: $WORKERS workers, $EPOCHS epochs, learning rate $rate; logs in $folder/"
  start "the server" "$folder/server.log" build/bin/ps_server --listen=127.0.0.1:0 --num_workers="$WORKERS" \
    --mode="$mode" --optimizer=momentum --momentum=0.9 --learning_rate="$rate" --metrics_file="$folder/server.jsonl" \
    --http_listen=127.0.0.1:0 --http_runs=runs
  server_pid=$started
  wait_for_address "$server_pid" "$folder/server.out" "$folder/server.log"
  say "demo: $mode: page at $page"
  for ((rank = 0; rank < WORKERS; ++rank)); do
    start "worker $rank" "$folder/worker$rank.log" build/bin/ps_worker --server="$address" --rank="$rank" \
      --model="$MODEL" --activation=relu --dataset=fashion-mnist --batch_size="$BATCH_SIZE" --epochs="$EPOCHS" \
      --eval_every="$EVAL_EVERY" --metrics_file="$folder/worker$rank.jsonl"
    workers[$started]=1
    if ((rank == 0)); then
      tail -n +1 -s 0.2 --pid="$started" -f "$folder/worker0.log" >&2 &
      tail_pid=$!
    fi
  done
  # The server is among those watched, and first: when it fails the workers fail too, and the error to show is its.
  while ((${#workers[@]} > 0)); do
    mapfile -t running < <(printf '%s\n' "${!name_of[@]}" | sort -n)
    wait_for_any $((RUN_LIMIT_S + STOP_LIMIT_S)) "${running[@]}" || fail "$mode took longer than $RUN_LIMIT_S s"
    unset "workers[$reaped]"
  done
  if [[ -n ${name_of[$server_pid]:-} ]] && ! wait_for_any "$END_LIMIT_S" "$server_pid"; then
    fail "the server was still running $END_LIMIT_S s after its workers had finished" "$folder/server.log"
  fi
  wait "$tail_pid" || true  # It ends by itself when it has shown all that worker 0 said.
  tail_pid=
}

check_settings() {
  [[ $WORKERS =~ ^[1-9][0-9]*$ ]] || fail "WORKERS is '$WORKERS', expected a whole number of at least 1"
  [[ $EPOCHS =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)$ ]] || fail "EPOCHS is '$EPOCHS', expected a number"
  [[ $MODES =~ ^[a-z_]+( +[a-z_]+)*$ ]] || fail "MODES is '$MODES', expected names of modes with spaces between"
}

build() {
  local log=build/demo-build.log
  mkdir -p build
  say "demo: building"
  start "configuring" "$log" bash -c 'exec "$@" >&2' cmake cmake --preset release
  wait_for_any "$RUN_LIMIT_S" "$started" || fail "configuring took longer than $RUN_LIMIT_S s" "$log"
  start "the build" "$log" bash -c 'exec "$@" >&2' cmake cmake --build --preset release --parallel "$(nproc)" \
    --target ps_server ps_worker ps_ctl
  wait_for_any "$RUN_LIMIT_S" "$started" || fail "the build took longer than $RUN_LIMIT_S s" "$log"
}

check_settings
bash deploy/install-deps.sh >&2 || fail "the packages could not be installed"
build
folders=()
for mode in $MODES; do
  train "$mode" "runs/demo-$mode"
  folders+=("runs/demo-$mode")
done
build/bin/ps_ctl report "${folders[@]}"
