"""What the simulations in NumPy that real programs are compared with have in common: a small network in double precision on
data of its own, files, and training with the programs.

Ends the program (a line that begins with SKIPPED:) where NumPy is not there.
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(0)

TIMEOUT_S = 120
WIDTHS = (4, 6, 3)
SAMPLES = 48
TOLERANCE = 2e-5  # Of the distance that the weights have moved.


# ---- Data and weights

def make_data():
    """Samples [SAMPLES, features] of classes that overlap, float32, and their labels."""
    random = np.random.default_rng(7)
    labels = random.integers(0, WIDTHS[-1], SAMPLES)
    centres = random.normal(size=(WIDTHS[-1], WIDTHS[0]))
    return (centres[labels] + random.normal(size=(SAMPLES, WIDTHS[0]))).astype(np.float32), labels


def make_weights(widths=WIDTHS):
    """[weight 0, bias 0, weight 1, bias 1], float32; a layer computes x W^T + b."""
    random = np.random.default_rng(3)
    weights = []
    for inputs, outputs in zip(widths, widths[1:]):
        weights.append(random.normal(scale=inputs**-0.5, size=(outputs, inputs)).astype(np.float32))
        weights.append(random.normal(scale=0.1, size=outputs).astype(np.float32))
    return weights


NAMES = [f"layer{layer}.{kind}" for layer in range(len(WIDTHS) - 1) for kind in ("weight", "bias")]


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, tensor in zip(NAMES, tensors, strict=True):
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors))


def read_safetensors(path):
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    tensors = []
    for name in NAMES:
        begin, stop = header[name]["data_offsets"]
        tensors.append(np.frombuffer(content[end + begin:end + stop], "<f4").reshape(header[name]["shape"]))
    return tensors


# ---- The simulation

class Problem:
    """The mean softmax cross-entropy of a network with one tanh layer on each batch of each rank."""

    def __init__(self, workers, batch, widths=WIDTHS):
        self.x, self.labels = make_data()
        self.workers, self.batch, self.widths = workers, batch, widths
        self.per_epoch = -(-SAMPLES // (workers * batch))

    def indices(self, rank, number):
        """Of the rank's batch of this number, from 0: in file order, the rank's run of the global batch."""
        start = number % self.per_epoch * self.workers * self.batch
        begin = min(start + rank * self.batch, SAMPLES)
        return range(begin, min(begin + self.batch, SAMPLES))

    def gradient(self, weights, indices):
        w0, b0, w1, b1 = weights
        x, labels = self.x[indices].astype(float), self.labels[indices]
        hidden = np.tanh(x @ w0.T + b0)
        logits = hidden @ w1.T + b1
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        d_logits = p / len(labels)
        d_hidden = d_logits @ w1 * (1 - hidden**2)
        return [d_hidden.T @ x, d_hidden.sum(axis=0), d_logits.T @ hidden, d_logits.sum(axis=0)]


def zeros():
    return [np.zeros(weight.shape) for weight in make_weights()]


def mean(terms):
    """Of [(tensors, samples)], weighted by samples."""
    total = sum(samples for _, samples in terms)
    result = [0.0] * len(NAMES)
    for tensors, samples in terms:
        if samples:
            result = [r + samples / total * t for r, t in zip(result, tensors)]
    return result


def after_warmup(decay, warmup, length):
    """The factor of the learning rate by position, in samples: it rises to 1 where the warm-up ends; from there it is
    decay(x), with x from 0 to 1 at `length`, and decay(1) from then on."""
    def factor(position):
        if position < warmup:
            return position / warmup
        return decay(min(1, (position - warmup) / (length - warmup)))
    return factor


def minus(a, b):
    return [p - q for p, q in zip(a, b)]


def plus(a, b):
    return [p + q for p, q in zip(a, b)]


# ---- The programs

def start(log, *command):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=log, text=True)


def train(build, folder, problem, steps, shards, server_flags, worker_flags=()):
    """Trains with the real programs; returns the final weights, and the servers' first metrics file's lines."""
    np.savetxt(folder / "train.csv", np.column_stack(make_data()), fmt=["%.9g"] * WIDTHS[0] + ["%d"], delimiter=",")
    write_safetensors(folder / "init.safetensors", make_weights(problem.widths))
    final, metrics = folder / "final.safetensors", folder / "server-0.jsonl"
    started, addresses = [], []
    with open(folder / "log", "w+", encoding="utf-8") as log:
        try:
            for shard in range(shards):
                chief = [f"--chief={addresses[0]}"] if shard else []
                started.append(start(log, build / "bin/ps_server", f"--num_workers={problem.workers}", *chief,
                                     f"--num_shards={shards}", f"--shard={shard}",
                                     f"--metrics_file={folder}/server-{shard}.jsonl", *server_flags))
                addresses.append(started[-1].stdout.readline().removeprefix("listening on ").strip())
            for rank in range(problem.workers):
                started.append(start(log, build / "bin/ps_worker", f"--server={addresses[0]}", f"--rank={rank}",
                                     "--model=mlp:" + ",".join(map(str, problem.widths)), "--activation=tanh",
                                     f"--dataset=csv:{folder}/train.csv,{folder}/train.csv", "--normalize=none",
                                     "--shuffle=false", f"--batch_size={problem.batch}", f"--steps={steps}",
                                     "--eval_every=0.3", f"--init_weights={folder}/init.safetensors",
                                     f"--metrics_file={folder}/worker-{rank}.jsonl", f"--save_weights={final}",
                                     *worker_flags))
            statuses = [process.wait(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        log.seek(0)
        assert statuses == [0] * len(statuses), f"exit statuses {statuses}: {log.read()}"
    return read_safetensors(final), [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def apart(a, b):
    return np.sqrt(sum(np.sum((x - y)**2) for x, y in zip(a, b, strict=True)))


def check_same(name, weights, expected, widths=WIDTHS):
    moved = apart(expected, make_weights(widths))
    distance = apart(weights, expected) / moved
    print(f"{name}: the weights are {distance:.2g} of the distance that they moved away from the simulation's")
    assert moved > 0.05 and distance < TOLERANCE, (name, moved, distance)


def run_cases(cases):
    """BUILD_FOLDER [CASE...]: each case is called with the build folder and a folder of its own."""
    by_name = {case.__name__: case for case in cases}
    for name in sys.argv[2:] or by_name:
        with tempfile.TemporaryDirectory() as folder:
            by_name[name](pathlib.Path(sys.argv[1]), pathlib.Path(folder))
