#!/usr/bin/env bash
# Runs all checks and benchmarks that need a GPU, and prints a short table of the results.
#
#   tests/gpu/run.sh [PART...]         from the project, with the programs in build/bin
#   ps-gpu/run.sh [PART...]            from an unpacked bundle (tests/gpu/bundle.sh)
#
# Parts: checks, sanitizer, bench; all of them by default. BIN=FOLDER is where the programs are.
# Logs: runs/gpu/ in the current folder. Exit status: 0 if nothing failed, also if everything is skipped for lack of a GPU.
set -uo pipefail

readonly here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -d $here/bin ]]; then
  readonly bin=$here/bin
  readonly libraries=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PS_TEST_DATA_DIR=$here/data/tests PS_DATA_DIR=${PS_DATA_DIR:-$here/data}
else
  readonly bin=$(cd "${BIN:-$here/../../build/bin}" && pwd) libraries=${LD_LIBRARY_PATH:-}
fi
readonly logs=$PWD/runs/gpu
mkdir -p "$logs"
failed=0

for name in "$@"; do
  if [[ ! $name =~ ^(checks|sanitizer|bench)$ ]]; then
    echo "run.sh: unknown part '$name' (checks, sanitizer or bench)" >&2
    exit 2
  fi
done
readonly parts=" ${*:-checks sanitizer bench} "
# Whether this part was asked for.
part() { [[ $parts == *" $1 "* ]]; }

# The bundle's libraries are for its programs alone: Python has its own.
ours() { LD_LIBRARY_PATH=$libraries "$@"; }

# row NAME RESULT
row() { printf '| %-44s | %-80s |\n' "$1" "$2"; }

# check NAME LIMIT_S COMMAND...: a test; its last non-empty line is the result.
check() {
  local name=$1 limit=$2 log=$logs/${1//[^a-zA-Z0-9]/-}.log
  shift 2
  if ours timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1; then
    local ended
    ended=$(grep -v '^ *$' "$log" | tail -n 1)
    if grep -q '^SKIPPED:' "$log"; then
      ended="$(grep -c '^SKIPPED:' "$log") skipped: $(sed -n 's/^SKIPPED: //p' "$log" | sort -u | sed -n 1p)"
    fi
    row "$name" "${ended:0:80}"
  else
    row "$name" "FAILED, status $?: $log"
    failed=$((failed + 1))
    tail -n 30 "$log"
  fi
}

if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
else
  echo "nvidia-smi was not found"
fi

sanitize() {
  local tool
  for tool in memcheck racecheck synccheck; do
    if ! command -v compute-sanitizer >/dev/null; then
      row "compute-sanitizer $tool" "skipped: it is not installed"
    elif ! ours compute-sanitizer --tool "$tool" "$bin/model_test" "GPU: samples*" >"$logs/$tool-try.log" 2>&1; then
      row "compute-sanitizer $tool" "skipped: it does not run on this device"
    else
      # An allocation that fails, as a test wants it to, would be an error.
      check "compute-sanitizer $tool" 600 \
        compute-sanitizer --tool "$tool" --error-exitcode 99 "$bin/model_test" '"GPU:*"~"GPU: too much*"'
    fi
  done
}

# psgrad.torch: the package's tests are not in a bundle.
package() {
  if [[ ! -f $here/../python/torch_support.py ]]; then
    row "psgrad.torch" "skipped: not in a bundle"
  elif ! python3 -c 'import psgrad.torch, pytest, torch; assert torch.cuda.is_available()' >"$logs/package.log" 2>&1; then
    row "psgrad.torch" "skipped: needs psgrad, pytest and PyTorch that finds a card ($logs/package.log)"
  else
    PSGRAD_BIN=${PSGRAD_BIN:-$bin} check "psgrad.torch" 600 python3 -m pytest -q -p no:cacheprovider \
      "$here/test_torch_cuda.py"
  fi
}

# train LOG H MATH STEPS FLAG...: one worker's steps without and with servers, as JSON.
train() {
  local log=$1 h=$2 math=$3 steps=$4
  shift 4
  ours timeout 300 "$bin/ps_bench" train --json --device=cuda --math="$math" --model="mlp:784,$h,$h,10" \
    --batch_size=256 --workers=1 --steps="$steps" "$@" >"$log.json" 2>"$log.log" || failed=$((failed + 1))
}

# step H MATH: one row of the table of steps.
step() {
  local h=$1 math=$2 log=$logs/step-$1-$2 steps=200
  if ((h > 4000)); then steps=40; fi
  train "$log-shm" "$h" "$math" "$steps" --transport=shm
  train "$log-tcp" "$h" "$math" "$steps" --servers=4
  # Gradients are rounded on the card.
  train "$log-half" "$h" "$math" "$steps" --servers=4 --wire_dtype=bfloat16 --weights_wire_dtype=bfloat16
  timeout 300 python3 "$here/torch_step.py" "$h" "$math" >"$log-torch.json" 2>"$log-torch.log" ||
    echo '{}' >"$log-torch.json"
  python3 - "$h" "$math" "$log" <<'PYTHON' || failed=$((failed + 1))
import json, sys
h, math, log = sys.argv[1:]
def ms(part, key="samples_per_s"):
    try:
        return f'{256e3 / json.load(open(f"{log}-{part}.json"))["rows"][0][key]:.4f}'
    except ValueError:
        return "failed"
torch = json.load(open(f"{log}-torch.json"))
of = lambda key: f"{torch[key]:.4f}" if key in torch else "-"
cells = [h, math, ms("shm", "alone_samples_per_s"), of("eager_ms"), of("graph_ms"), ms("shm"), ms("tcp"), ms("half")]
print("| " + " | ".join(cells) + " |")
PYTHON
}

bench() {
  if ! ours "$bin/ps_bench" train --device=cuda --model=mlp:4,4 --workers=1 --steps=2 >"$logs/try.log" 2>&1; then
    row "benchmarks" "skipped: ps_bench finds no GPU"
    return
  fi
  check "products, CPU and GPU" 300 "$bin/ps_bench" gemm --device=cpu,cuda
  check "400-25-10 on the CPU" 60 "$bin/ps_bench" train --model=mlp:400,25,10 --batch_size=5000 --workers=1 --steps=200
  check "400-25-10 on the GPU" 60 "$bin/ps_bench" train --device=cuda --model=mlp:400,25,10 --batch_size=5000 \
    --workers=1 --steps=200
  printf '\nms of a step: alone, with one server of this host, and with 4 servers over TCP in 32 and in 16 bits\n\n'
  printf '| h | math | alone | PyTorch eager | PyTorch with graphs | shared memory | TCP | TCP, bfloat16 |\n'
  printf '|--:|:--|--:|--:|--:|--:|--:|--:|\n'
  local h math
  for h in 512 2048 8192; do
    for math in float32 tf32 bfloat16; do step "$h" "$math"; done
  done
}

printf '\n| %-44s | %-80s |\n|:%s|:%s|\n' check result "$(printf '%045d' 0 | tr 0 -)" "$(printf '%081d' 0 | tr 0 -)"
if part checks; then
  check "backend" 300 "$bin/model_test" "GPU:*"
  check "devices" 60 "$bin/model_test" "Workers of a host*"
  check "jobs, and traces of PyTorch and NumPy" 600 "$bin/integration_test" "GPU:*"
  package
fi
if part sanitizer; then sanitize; fi
if part bench; then bench; fi
echo "$failed failed"
((failed == 0))
