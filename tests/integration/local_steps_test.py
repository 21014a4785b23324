"""Workers that take steps of their own, against simulations in NumPy: the weights that the real programs save are those
that a simulation in double precision ends with, up to what float32 rounds off.

    local_steps_test.py BUILD_FOLDER [CASE...]

Skipped (a line that begins with SKIPPED:) where NumPy is not there.
"""
import itertools
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
RATE, MOMENTUM, DECAY = 0.05, 0.8, 0.01
TOLERANCE = 2e-5  # Of the distance that the weights have moved.


# ---- Data and weights

def make_data():
    """Samples [SAMPLES, features] of classes that overlap, float32, and their labels."""
    random = np.random.default_rng(7)
    labels = random.integers(0, WIDTHS[-1], SAMPLES)
    centres = random.normal(size=(WIDTHS[-1], WIDTHS[0]))
    return (centres[labels] + random.normal(size=(SAMPLES, WIDTHS[0]))).astype(np.float32), labels


def make_weights():
    """[weight 0, bias 0, weight 1, bias 1], float32; a layer computes x W^T + b."""
    random = np.random.default_rng(3)
    weights = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
        weights.append(random.normal(scale=0.5, size=(outputs, inputs)).astype(np.float32))
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

    def __init__(self, workers, batch):
        self.x, self.labels = make_data()
        self.workers, self.batch = workers, batch
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


class Optimizer:
    """SGD with momentum (0: without), as torch.optim's."""

    def __init__(self, momentum):
        self.momentum, self.velocity = momentum, zeros()

    def step(self, weights, gradient, factor=1.0):
        self.velocity = [self.momentum * v + g + DECAY * w for v, g, w in zip(self.velocity, gradient, weights)]
        return [w - factor * RATE * v for w, v in zip(weights, self.velocity)]


def constant(_position):
    return 1.0


def cosine(warmup, length):
    """The factor of the learning rate by position, in samples: a warm-up, then PyTorch's CosineAnnealingLR."""
    def factor(position):
        if position < warmup:
            return position / warmup
        return (1 + np.cos(np.pi * min(1, (position - warmup) / (length - warmup)))) / 2
    return factor


class Worker:
    def __init__(self, problem, rank, weights, momentum):
        self.problem, self.rank = problem, rank
        self.x, self.optimizer = [weight.astype(float) for weight in weights], Optimizer(momentum)
        self.samples = 0  # Since weights were exchanged.
        self.schedule, self.position = constant, 0  # The position when weights came last,
        self.passed = 0  # and the samples of this worker since, which it pushes with the next exchange.

    def gradient(self, number):
        """The gradient and the samples of a batch; no gradient without samples."""
        indices = self.problem.indices(self.rank, number)
        self.samples += len(indices)
        self.passed += len(indices)
        return (self.problem.gradient(self.x, indices) if indices else None), len(indices)

    def step(self, number):
        # The others are taken to be as fast.
        factor = self.schedule(self.position + self.problem.workers * self.passed)
        gradient, _ = self.gradient(number)
        if gradient is not None:
            self.x = self.optimizer.step(self.x, gradient, factor)


def mean(terms):
    """Of [(tensors, samples)], weighted by samples."""
    total = sum(samples for _, samples in terms)
    result = zeros()
    for tensors, samples in terms:
        if samples:
            result = [r + samples / total * t for r, t in zip(result, tensors)]
    return result


def minus(a, b):
    return [p - q for p, q in zip(a, b)]


def plus(a, b):
    return [p + q for p, q in zip(a, b)]


class Averages:
    """The servers' weights w, to which mean differences are added with Nesterov momentum, and the workers."""

    def __init__(self, problem, momentum, outer, schedule):
        self.w = [weight.astype(float) for weight in make_weights()]
        self.workers = [Worker(problem, rank, self.w, momentum) for rank in range(problem.workers)]
        self.outer, self.velocity = outer, zeros()
        self.schedule, self.position = schedule, 0
        self.exchanged()

    def exchanged(self):
        """All workers have pushed what they have passed, and go on from the servers' position."""
        for worker in self.workers:
            self.position += worker.passed
        for worker in self.workers:
            worker.schedule, worker.position, worker.passed = self.schedule, self.position, 0

    def average(self):
        d = mean([(minus(worker.x, self.w), worker.samples) for worker in self.workers])
        self.velocity = [self.outer * v + each for v, each in zip(self.velocity, d)]
        self.w = [w + each + self.outer * v for w, each, v in zip(self.w, d, self.velocity)]
        for worker in self.workers:
            worker.x, worker.samples = list(self.w), 0
        self.exchanged()


def average_weights(problem, steps, k, momentum, outer=0.0, schedule=constant):
    job = Averages(problem, momentum, outer, schedule)
    for number in range(steps):
        for worker in job.workers:
            worker.step(number)
        if (number + 1) % k == 0 or number + 1 == steps:
            job.average()
    return job.w


def average_gradients(problem, steps, k, every, momentum, schedule=constant, averages_at_end=True):
    job = Averages(problem, momentum, 0.0, schedule)
    server = Optimizer(momentum)
    for number in range(steps):
        if (number + 1) % every == 0 or (averages_at_end and number + 1 == steps):
            for worker in job.workers:
                worker.step(number)
            job.average()
        elif k and (number + 1) % k == 0:
            before = job.w
            position = job.position + sum(worker.passed for worker in job.workers)
            gradient = mean([worker.gradient(number) for worker in job.workers])
            job.w = server.step(before, gradient, schedule(position))
            for worker in job.workers:
                worker.x = plus(worker.x, minus(job.w, before))
            job.exchanged()
        else:
            for worker in job.workers:
                worker.step(number)
    return job.w


def elastic(problem, steps, k, momentum, alpha, pushes, starts):
    """`pushes`: (rank, version that it pulled) of each push, in the order in which they were applied. `starts`: the
    version that each rank began with."""
    centres = [[weight.astype(float) for weight in make_weights()]]
    workers = [None] * problem.workers
    batches = [0] * len(workers)
    for rank, pulled in pushes:
        if workers[rank] is None:
            workers[rank] = Worker(problem, rank, centres[starts[rank]], momentum)
        worker = workers[rank]
        for _ in range(min(k, steps - batches[rank])):
            worker.step(batches[rank])
            batches[rank] += 1
        difference = [alpha * each for each in minus(worker.x, centres[pulled])]
        worker.x = minus(worker.x, difference)
        centres.append(plus(centres[-1], difference))
    assert batches == [steps] * len(workers), batches
    return centres[-1]


# ---- The programs

def start(log, *command):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=log, text=True)


def train(build, folder, problem, steps, shards, server_flags):
    """Trains with the real programs; returns the final weights, and the servers' first metrics file's lines."""
    np.savetxt(folder / "train.csv", np.column_stack(make_data()), fmt=["%.9g"] * WIDTHS[0] + ["%d"], delimiter=",")
    write_safetensors(folder / "init.safetensors", make_weights())
    final, metrics = folder / "final.safetensors", folder / "server-0.jsonl"
    started, addresses = [], []
    with open(folder / "log", "w+", encoding="utf-8") as log:
        try:
            for shard in range(shards):
                chief = [f"--chief={addresses[0]}"] if shard else []
                started.append(start(log, build / "bin/ps_server", f"--num_workers={problem.workers}", *chief,
                                     f"--num_shards={shards}", f"--shard={shard}", f"--learning_rate={RATE}",
                                     f"--weight_decay={DECAY}", f"--metrics_file={folder}/server-{shard}.jsonl",
                                     *server_flags))
                addresses.append(started[-1].stdout.readline().removeprefix("listening on ").strip())
            for rank in range(problem.workers):
                started.append(start(log, build / "bin/ps_worker", f"--server={addresses[0]}", f"--rank={rank}",
                                     "--model=mlp:" + ",".join(map(str, WIDTHS)), "--activation=tanh",
                                     f"--dataset=csv:{folder}/train.csv,{folder}/train.csv", "--normalize=none",
                                     "--shuffle=false", f"--batch_size={problem.batch}", f"--steps={steps}",
                                     "--eval_every=0.3", f"--init_weights={folder}/init.safetensors",
                                     f"--metrics_file={folder}/worker-{rank}.jsonl", f"--save_weights={final}"))
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


def check_same(name, weights, expected):
    moved = apart(expected, make_weights())
    distance = apart(weights, expected) / moved
    print(f"{name}: the weights are {distance:.2g} of the distance that they moved away from the simulation's")
    assert moved > 0.05 and distance < TOLERANCE, (name, moved, distance)


def optimizer_flags(momentum):
    return ["--optimizer=momentum", f"--momentum={momentum}"] if momentum else ["--optimizer=sgd"]


# ---- Cases. Ranks have fewer samples, or none, in an epoch's last batch, and budgets are no multiple of the rounds.

def local_sgd(build, folder):
    for (workers, batch), shards, momentum, outer in (((2, 16), 1, MOMENTUM, 0.0), ((3, 7), 3, MOMENTUM, 0.5),
                                                      ((2, 16), 3, 0.0, 0.0)):
        problem = Problem(workers, batch)
        outer_flags = [f"--outer_momentum={outer}"] if outer else []
        weights, _ = train(build, folder, problem, 11, shards,
                           ["--mode=local_sgd", "--local_steps=3", *outer_flags, *optimizer_flags(momentum)])
        check_same(f"local_sgd, {workers} workers, {shards} servers", weights,
                   average_weights(problem, 11, 3, momentum, outer))


def local_sgd_gradients(build, folder):
    problem = Problem(2, 16)
    for shards, k, flag, every in ((1, 2, "5", 5), (3, 2, "2.5epochs", 5), (1, 0, "4", 4)):
        weights, _ = train(build, folder, problem, 13, shards,
                           ["--mode=local_sgd", "--local_sync=gradients", f"--local_steps={k}",
                            f"--average_every={flag}", *optimizer_flags(MOMENTUM)])
        check_same(f"local_sgd of gradients, k = {k}, {shards} servers", weights,
                   average_gradients(problem, 13, k, every, MOMENTUM))


def easgd(build, folder):
    for workers, batch, alpha in ((1, 10, 0.4), (3, 7, 0.3)):
        problem = Problem(workers, batch)
        weights, lines = train(build, folder, problem, 11, 1,
                               ["--mode=easgd", "--local_steps=2", f"--easgd_alpha={alpha}",
                                *optimizer_flags(MOMENTUM)])
        applied = [line for line in lines if line["event"] == "apply"]
        pushes = [(line["ranks"][0], line["version"] - 1 - line["staleness"][0]) for line in applied]
        # Nothing tells with which version a rank began, only that it was none after that of its first push.
        first = [next(pulled for rank, pulled in pushes if rank == each) for each in range(workers)]
        ends = [elastic(problem, 11, 2, MOMENTUM, alpha, pushes, starts)
                for starts in itertools.product(*(range(version + 1) for version in first))]
        check_same(f"easgd, {workers} workers", weights, min(ends, key=lambda end: apart(weights, end)))


def schedules(build, folder):
    """bsp, local_sgd and local_sgd of gradients with a schedule that ends before the job does."""
    flags = ["--schedule=cosine", "--warmup=0.5epochs", f"--schedule_length={4 * SAMPLES}samples"]
    schedule = cosine(SAMPLES / 2, 4 * SAMPLES)
    problem = Problem(2, 16)
    for shards in (1, 3):
        weights, lines = train(build, folder, problem, 11, shards,
                               ["--mode=bsp", *flags, *optimizer_flags(MOMENTUM)])
        check_same(f"bsp with a schedule, {shards} servers", weights,
                   average_gradients(problem, 11, 1, 1000, MOMENTUM, schedule, averages_at_end=False))
        rates = [line["learning_rate"] for line in lines if line["event"] == "apply"]
        positions = [number // 2 * SAMPLES + number % 2 * 32 for number in range(11)]
        assert np.allclose(rates, [RATE * schedule(position) for position in positions], rtol=1e-6, atol=0), rates
    for (workers, batch), shards, outer in (((2, 16), 1, 0.0), ((3, 7), 3, 0.5)):
        problem = Problem(workers, batch)
        outer_flags = [f"--outer_momentum={outer}"] if outer else []
        weights, _ = train(build, folder, problem, 11, shards,
                           ["--mode=local_sgd", "--local_steps=3", *outer_flags, *flags, *optimizer_flags(MOMENTUM)])
        check_same(f"local_sgd with a schedule, {workers} workers, {shards} servers", weights,
                   average_weights(problem, 11, 3, MOMENTUM, outer, schedule))
    problem = Problem(2, 16)
    weights, _ = train(build, folder, problem, 13, 3,
                       ["--mode=local_sgd", "--local_sync=gradients", "--local_steps=2", "--average_every=5", *flags,
                        *optimizer_flags(MOMENTUM)])
    check_same("local_sgd of gradients with a schedule", weights,
               average_gradients(problem, 13, 2, 5, MOMENTUM, schedule))


def one_local_step_is_bsp(build, folder):
    problem = Problem(2, 16)
    for shards in (1, 3):
        bsp, _ = train(build, folder, problem, 12, shards, ["--mode=bsp", *optimizer_flags(0)])
        weights, _ = train(build, folder, problem, 12, shards,
                           ["--mode=local_sgd", "--local_steps=1", *optimizer_flags(0)])
        check_same(f"local_sgd with one step, and bsp, {shards} servers", weights, bsp)


CASES = {case.__name__: case for case in (local_sgd, local_sgd_gradients, easgd, schedules, one_local_step_is_bsp)}


def main():
    build = pathlib.Path(sys.argv[1])
    for case in sys.argv[2:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            CASES[case](build, pathlib.Path(folder))


main()
