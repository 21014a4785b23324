#!/usr/bin/env bash
# Two servers and three workers in containers, one worker four times as slow as the others, train Fashion-MNIST first in
# sync and then in async mode; then in sync mode once more, with checkpoints, and a worker and then the chief are killed on the
# way; then a job to which a worker comes while it trains, and which two others leave. At the end it says what the slow worker
# cost, with figures, whether the weights are those of an undisturbed run, and whether each sample counted once.
#
#   deploy/compose-demo.sh [--no-build]
#
#   --no-build   uses the image ps:latest as it is
#
# Needs Docker with Compose, Python 3.10 and what install-deps.sh --plots installs. The workers are slow because they idle
# (--experiment_step_time), so that what is compared are the modes, also on a machine of two cores. Metrics and the report
# are in runs/compose/. Under four minutes once the image is built.
#
#   EPOCHS=4             passes over the training data
#   STEP_TIME_MS=10      time of a batch; the slow worker's is four times that
#   PAGE=127.0.0.1:8080  where the page that shows each job is to be; without it, there or on a free port
#
# Exit status: 0 if all verdicts are "yes", 1 if one is "no" or something failed, 2 bad usage.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly UP_LIMIT_S=${UP_LIMIT_S:-1200} RUNS=runs/compose
export EPOCHS=${EPOCHS:-4}
step_time_ms=${STEP_TIME_MS:-10}

fail() {
  echo "compose-demo: $1" >&2
  exit 1
}

build=(--build)
for argument in "$@"; do
  case "$argument" in
    --no-build) build=() ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) echo "compose-demo: unknown argument '$argument' (the option is --no-build)" >&2; exit 2 ;;
  esac
done
[[ $EPOCHS =~ ^[1-9][0-9]*$ ]] || { echo "compose-demo: EPOCHS is '$EPOCHS', expected a whole number" >&2; exit 2; }
[[ $step_time_ms =~ ^[1-9][0-9]*$ ]] ||
  { echo "compose-demo: STEP_TIME_MS is '$step_time_ms', expected a whole number" >&2; exit 2; }
export STEP_TIME=${step_time_ms}ms SLOW_STEP_TIME=$((4 * step_time_ms))ms

if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
elif command -v docker-compose >/dev/null; then
  compose=(docker-compose)
else
  fail "there is no Docker Compose (docker compose, or docker-compose)"
fi
docker info >/dev/null 2>&1 || fail "no Docker engine runs, or it may not be used by $(id -un)"
deploy/compare.sh --no-build --packages || exit 1
compose+=(-p ps-demo -f deploy/docker-compose.yml)

# An address for the page that nobody has.
free_page() {
  python3 - <<'PYTHON'
import socket

for port in (8080, 0):
    try:
        with socket.create_server(("127.0.0.1", port)) as listener:
            print("127.0.0.1:%d" % listener.getsockname()[1])
        break
    except OSError:
        continue
PYTHON
}
PAGE=${PAGE:-$(free_page)}
export PAGE
echo "compose-demo: each job's page, while it trains: http://$PAGE" >&2

# However this ends, no container stays.
down() { timeout 120 "${compose[@]}" --profile expected down --volumes >/dev/null 2>&1 || true; }
trap down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# train MODE: the whole job; its containers' output in runs/compose/MODE.log.
train() {
  local mode=$1 log=$RUNS/$1.log container state
  echo "compose-demo: $mode: 2 servers, 3 workers, one of them with $SLOW_STEP_TIME instead of $STEP_TIME a batch" >&2
  MODE=$mode timeout "$UP_LIMIT_S" "${compose[@]}" up "${build[@]}" >"$log" 2>&1 </dev/null ||
    { tail -n 20 "$log" >&2; fail "$mode: docker compose up failed or took longer than $UP_LIMIT_S s; its output is in $log"; }
  build=()
  for container in $(MODE=$mode "${compose[@]}" ps -a -q); do
    state=$(docker inspect --format '{{.Name}} {{.State.Status}} {{.State.ExitCode}}' "$container")
    [[ $state == *' exited 0' ]] || fail "$mode: a container ended badly: $state; its output is in $log"
  done
  MODE=$mode "${compose[@]}" down --volumes >>"$log" 2>&1
}

# The sync job with checkpoints. A worker is killed (SIGKILL): its container starts another one, which takes its rank, and the
# others wait for that. Then the chief is killed, and comes back likewise.
train_killed() {
  local log=$RUNS/killed.log checkpoints=$RUNS/killed/checkpoints deadline=$((SECONDS + UP_LIMIT_S)) container chief worker
  # checkpoints_reach N: waits for the checkpoint of this number, or a later one.
  checkpoints_reach() {
    until (($(find "$checkpoints" -name manifest.json 2>/dev/null |
      sed 's|.*checkpoint-0*||; s|/.*||' | sort -n | tail -n 1) + 0 >= $1)); do
      ((SECONDS < deadline)) || fail "the job with checkpoints wrote no checkpoint $1"
      sleep 0.1
    done
  }
  killed() {
    env RUNS=../runs/compose/killed MODE=bsp SLOW_STEP_TIME="$STEP_TIME" \
      SERVER_FLAGS="--checkpoint_dir=/runs/checkpoints --checkpoint_every=50 --on_worker_loss=wait" \
      timeout "$UP_LIMIT_S" "${compose[@]}" "$@"
  }
  # kill_in CONTAINER PROGRAM: from inside, since what `docker kill` ends is not started again, whatever its policy says.
  kill_in() { docker exec "$1" sh -c "kill -KILL \$(pidof $2)" >>"$log" 2>&1 </dev/null; }
  echo "compose-demo: the sync job with checkpoints; a worker and then server-0 are killed, and others take their places" >&2
  killed up -d >"$log" 2>&1 </dev/null || { tail -n 20 "$log" >&2; fail "the job with checkpoints did not start; see $log"; }
  chief=$(killed ps -q server-0)
  worker=$(killed ps -q worker | sed -n 1p)
  checkpoints_reach 2
  kill_in "$worker" ps_worker
  checkpoints_reach 4
  kill_in "$chief" ps_server
  for container in $(killed ps -a -q); do
    while [[ $(docker inspect --format '{{.State.Status}}' "$container") != exited ]]; do
      ((SECONDS < deadline)) || fail "the job with checkpoints did not end; its output is in $log"
      sleep 0.2
    done
  done
  killed logs --no-color >>"$log" 2>&1
  for container in "$worker" "$chief"; do
    (($(docker inspect --format '{{.RestartCount}}' "$container") >= 1)) ||
      fail "a program that was killed was not started again; see $log"
  done
  grep -q 'joined ([0-9]* of [0-9]*), incarnation 2' "$log" || fail "no worker has taken the rank of the one killed; see $log"
  killed down --volumes >>"$log" 2>&1
}

# A sync job to which a worker comes while it trains, and which two leave: with Compose, another number of containers.
train_elastic() {
  local log=$RUNS/elastic.log deadline=$((SECONDS + UP_LIMIT_S)) chief container status
  elastic() {
    env RUNS=../runs/compose/elastic MODE=bsp BUDGET=job EPOCHS=2 STEP_TIME="$SLOW_STEP_TIME" \
      SERVER_FLAGS="--min_workers=1 --max_workers=4" timeout "$UP_LIMIT_S" "${compose[@]}" "$@"
  }
  # becomes N: there are so many containers of full speed, beside the slow one, and as many workers in the job.
  becomes() {
    elastic up -d --no-deps --no-recreate --scale worker="$1" worker >>"$log" 2>&1 </dev/null ||
      { tail -n 20 "$log" >&2; fail "the job with workers that come and go could not have $1 of them; see $log"; }
    until status=$(docker exec "$chief" ps_ctl --server=127.0.0.1:5000 status 2>/dev/null) &&
      [[ $status == *$'\n'"workers: $(($1 + 1)) of"* ]]; do
      ((SECONDS < deadline)) || fail "the job with workers that come and go did not get to $1 and a slow one; see $log"
      [[ $(docker inspect --format '{{.State.Status}}' "$chief") == running ]] ||
        fail "the job with workers that come and go was over before it had $1 and a slow one; see $log"
      sleep 0.1
    done
  }
  echo "compose-demo: a sync job of 3 workers to which one comes, and which two leave" >&2
  elastic up -d >"$log" 2>&1 </dev/null || { tail -n 20 "$log" >&2; fail "the job with workers that come and go did not start; see $log"; }
  chief=$(elastic ps -q server-0)
  becomes 3
  becomes 1
  for container in $(elastic ps -a -q); do
    while [[ $(docker inspect --format '{{.State.Status}}' "$container") != exited ]]; do
      ((SECONDS < deadline)) || fail "the job with workers that come and go did not end; its output is in $log"
      sleep 0.2
    done
    [[ $(docker inspect --format '{{.State.ExitCode}}' "$container") == 0 ]] ||
      fail "a container of the job with workers that come and go ended badly; its output is in $log"
  done
  elastic logs --no-color >>"$log" 2>&1
  elastic down --volumes >>"$log" 2>&1
}

# each_sample_once FILE EPOCHS: "yes" if what the chief handed out, less what came back, is each run of samples once, and the
# versions are made of as many samples as these have.
each_sample_once() {
  python3 - "$@" <<'PYTHON'
import collections, json, sys

events = [json.loads(line) for line in open(sys.argv[1])]
(terms,) = (event for event in events if event["event"] == "runs")
counts = collections.Counter()
for event in events:
    if event["event"] == "run":
        counts[event["run"]] += -1 if event["returned"] else 1
used = sum(sum(event["samples"]) for event in events if event["event"] == "apply")
once = counts == dict.fromkeys(range(terms["runs"]), 1) and used == terms["samples"] * int(sys.argv[2])
print("yes" if once else "no")
PYTHON
}

# hash_in LOG: the weights hash that the job printed.
hash_in() { sed -n 's/.*weights hash: \([0-9a-f]\{32\}\).*/\1/p' "$1" | tail -n 1; }

mkdir -p "$RUNS"
train bsp
train asp
train_killed
train_elastic
echo "compose-demo: the same sync job once more on one server, without a slow worker, for its weights" >&2
MODE=bsp timeout "$UP_LIMIT_S" "${compose[@]}" --profile expected run --rm -T expected >"$RUNS/expected.log" 2>&1 </dev/null ||
  { tail -n 20 "$RUNS/expected.log" >&2; fail "the job on one server failed; its output is in $RUNS/expected.log"; }
found=$(hash_in "$RUNS/bsp.log")
expected=$(hash_in "$RUNS/expected.log")
killed=$(hash_in "$RUNS/killed.log")
[[ -n $found && -n $expected ]] || fail "the sync job printed no weights hash; its output is in $RUNS/bsp.log"
once=$(each_sample_once "$RUNS/elastic/bsp/server-0.jsonl" 2)
echo "each sample counted once while workers came and went: $once"
deploy/compare.sh verdicts "$RUNS" --no-build --hash="$found" --expected_hash="$expected" --killed_hash="${killed:-none}"
[[ $once == yes ]]
