"""Workers that take steps of their own, against simulations in NumPy: the weights that the real programs save are those
that a simulation in double precision ends with, up to what float32 rounds off.

    local_steps_test.py BUILD_FOLDER [CASE...]

Skipped (a line that begins with SKIPPED:) where NumPy is not there.
"""
import itertools

from simulation import (SAMPLES, Problem, after_warmup, apart, check_same, make_weights, mean, minus, np, plus,
                        run_cases, train, zeros)

RATE, MOMENTUM, DECAY = 0.05, 0.8, 0.01


# ---- The simulation

class Optimizer:
    """SGD with momentum (0: without), as torch.optim's."""

    def __init__(self, momentum):
        self.momentum, self.velocity = momentum, zeros()

    def step(self, weights, gradient, factor=1.0):
        self.velocity = [self.momentum * v + g + DECAY * w for v, g, w in zip(self.velocity, gradient, weights)]
        return [w - factor * RATE * v for w, v in zip(weights, self.velocity)]


def constant(_position):
    return 1.0


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


class Averages:
    """The servers' weights w, to which mean differences are added with Nesterov momentum, and the workers."""

    def __init__(self, problem, momentum, outer, schedule, outer_lr=1.0):
        self.outer_lr = outer_lr
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
        self.w = [w + self.outer_lr * (each + self.outer * v) for w, each, v in zip(self.w, d, self.velocity)]
        for worker in self.workers:
            worker.x, worker.samples = list(self.w), 0
        self.exchanged()


def average_weights(problem, steps, k, momentum, outer=0.0, schedule=constant, outer_lr=1.0):
    job = Averages(problem, momentum, outer, schedule, outer_lr)
    for number in range(steps):
        for worker in job.workers:
            worker.step(number)
        if (number + 1) % k == 0 or number + 1 == steps:
            job.average()
    return job.w


def fragments_of(tensors, count):
    """Each tensor belongs to the fragment that has the fewest elements so far."""
    fragments, elements = [[] for _ in range(count)], [0] * count
    for place, tensor in enumerate(tensors):
        least = elements.index(min(elements))
        fragments[least].append(place)
        elements[least] += np.size(tensor)
    return fragments


class Fragments:
    """The servers' weights w, one fragment of which is averaged at a time, and the workers."""

    def __init__(self, w, workers, count, mix, outer, outer_lr):
        self.w, self.workers, self.mix, self.outer, self.outer_lr = w, workers, mix, outer, outer_lr
        self.velocity = [0 * each for each in w]
        self.anchors = list(w)
        self.fragments = fragments_of(w, count)
        self.samples = [[0] * count for _ in workers]  # Of each worker, since each fragment was pushed.
        self.open = [0] * len(workers)  # Samples of each worker since its last push.
        self.position = 0
        self.pushes, self.under_way = 0, None

    def passed(self, worker, samples):
        self.samples[worker] = [each + samples for each in self.samples[worker]]
        self.open[worker] += samples

    def push(self):
        self.under_way = self.pushes % len(self.fragments)
        self.pushes += 1
        self.position += sum(self.open)
        self.open = [0] * len(self.workers)
        total = sum(each[self.under_way] for each in self.samples)
        for place in self.fragments[self.under_way]:
            d = sum(each[self.under_way] / total * (worker.x[place] - self.anchors[place])
                    for each, worker in zip(self.samples, self.workers))
            self.velocity[place] = self.outer * self.velocity[place] + d
            self.w[place] = self.w[place] + self.outer_lr * (d + self.outer * self.velocity[place])
        for each in self.samples:
            each[self.under_way] = 0

    def take(self):
        if self.under_way is None:
            return
        for place in self.fragments[self.under_way]:
            self.anchors[place] = self.w[place]
            for worker in self.workers:
                worker.x[place] = self.mix * worker.x[place] + (1 - self.mix) * self.w[place]
        # The others are taken to be as fast since the push.
        for worker, samples in zip(self.workers, self.open):
            worker.position, worker.passed = self.position + len(self.workers) * samples, 0
        self.under_way = None


def average_fragments(problem, steps, h, count, overlap, mix, momentum, outer=0.9, outer_lr=0.7, schedule=constant):
    w = [weight.astype(float) for weight in make_weights()]
    workers = [Worker(problem, rank, w, momentum) for rank in range(problem.workers)]
    for worker in workers:
        worker.schedule = schedule
    job = Fragments(list(w), workers, count, mix, outer, outer_lr)
    batches = 0
    for number in range(steps):
        for place, worker in enumerate(workers):
            before = worker.passed
            worker.step(number)
            job.passed(place, worker.passed - before)
        batches += 1
        ends = number + 1 == steps
        if not ends and batches == h // count - overlap:
            job.push()
        if ends or batches == h // count:
            job.take()
            batches = 0
        for _ in range(count if ends else 0):
            job.push()
            job.take()
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


class Pushers:
    """Workers that push what their weights have moved by, each from the version that it began its round with."""

    def __init__(self, problem, steps, k, momentum, starts):
        self.problem, self.steps, self.k, self.momentum = problem, steps, k, momentum
        self.versions = [[weight.astype(float) for weight in make_weights()]]
        self.workers, self.batches = [None] * problem.workers, [0] * problem.workers
        self.began = list(starts)

    def push(self, rank, pulled):
        """The rank's next round, from what it pulled unless it is its first: the difference and the samples."""
        if self.workers[rank] is None:
            self.workers[rank] = Worker(self.problem, rank, self.versions[self.began[rank]], self.momentum)
        worker = self.workers[rank]
        if self.batches[rank]:
            self.began[rank] = pulled
            worker.x = list(self.versions[pulled])
        worker.samples = 0
        for _ in range(min(self.k, self.steps - self.batches[rank])):
            worker.step(self.batches[rank])
            self.batches[rank] += 1
        return minus(worker.x, self.versions[self.began[rank]]), worker.samples

    def end(self):
        assert self.batches == [self.steps] * len(self.workers), self.batches
        return self.versions[-1]


def delayed_nesterov(problem, steps, k, momentum, rate, outer, buffer, pushes, starts):
    """As `elastic`, but each worker's whole difference is applied when it comes."""
    pushers = Pushers(problem, steps, k, momentum, starts)
    velocity, total = zeros(), zeros()
    for number, (rank, pulled) in enumerate(pushes, start=1):
        d, _ = pushers.push(rank, pulled)
        total = plus(total, d)
        share = [each / buffer for each in d]
        if number % buffer == 0:
            velocity = [outer * v + each / buffer for v, each in zip(velocity, total)]
            total = zeros()
            share = [each + outer * v for each, v in zip(share, velocity)]
        pushers.versions.append([w + rate * each for w, each in zip(pushers.versions[-1], share)])
    return pushers.end()


def in_rounds(problem, steps, k, momentum, rate, outer, rounds, starts):
    """The mean of a round's differences is applied. A round is a list of ranks, and of the versions that their pushes
    were computed on."""
    pushers = Pushers(problem, steps, k, momentum, starts)
    velocity = zeros()
    for pushes in rounds:
        d = mean([pushers.push(rank, pulled) for rank, pulled in pushes])
        velocity = [outer * v + each for v, each in zip(velocity, d)]
        pushers.versions.append([w + rate * (each + outer * v) for w, each, v in zip(pushers.versions[-1], d, velocity)])
    return pushers.end()


def optimizer_flags(momentum):
    optimizer = ["--optimizer=momentum", f"--momentum={momentum}"] if momentum else ["--optimizer=sgd"]
    return [*optimizer, f"--learning_rate={RATE}", f"--weight_decay={DECAY}"]


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


def diloco(build, folder):
    for (workers, batch), shards in (((2, 16), 1), ((3, 7), 3)):
        problem = Problem(workers, batch)
        weights, _ = train(build, folder, problem, 23, shards,
                           ["--mode=diloco", "--local_steps=5", *optimizer_flags(MOMENTUM)])
        check_same(f"diloco, {workers} workers, {shards} servers", weights,
                   average_weights(problem, 23, 5, MOMENTUM, 0.9, outer_lr=0.7))


class Falls:
    """A worker of two parameters whose gradient is always 2, at a rate of 1."""

    def __init__(self):
        self.x = [1.0, 1.0]
        self.position = self.passed = 0

    def step(self):
        self.x = [each - 2 for each in self.x]


def fixture(overlap, mix):
    """Two fragments with H = 6 and an outer SGD of rate 2: the servers' values after each of four pushes. They are those of
    torchft's test of Streaming DiLoCo."""
    worker = Falls()
    job = Fragments([1.0, 1.0], [worker], 2, mix, outer=0.0, outer_lr=2.0)
    values = []
    for batch in range(1, 13):
        worker.step()
        job.passed(0, 1)
        if (batch + overlap) % 3 == 0:
            job.push()
            values.append(job.w[job.under_way])
        if batch % 3 == 0:
            job.take()
    return values


def diloco_fragments(build, folder):
    known = {(0, 0): [-11, -23, -35, -47], (0, 0.5): [-11, -23, -29, -35],
             (1, 0): [-7, -19, -27, -39], (1, 0.5): [-7, -19, -25, -31]}
    for (overlap, mix), values in known.items():
        assert fixture(overlap, mix) == values, (overlap, mix, fixture(overlap, mix))
    for (workers, batch), shards, h, count, overlap, mix in (
            ((2, 16), 1, 6, 2, 0, 0.0), ((2, 16), 3, 6, 2, 1, 0.5), ((3, 7), 3, 6, 3, 1, 0.0), ((2, 16), 1, 5, 1, 2, 0.25),
            ((3, 7), 1, 4, 4, 0, 1.0)):
        problem = Problem(workers, batch)
        weights, lines = train(build, folder, problem, 23, shards,
                               ["--mode=diloco", f"--local_steps={h}", f"--fragments={count}", f"--overlap={overlap}",
                                f"--mix={mix}", *optimizer_flags(MOMENTUM)])
        check_same(f"diloco in {count} fragments of {h} batches, {workers} workers, {shards} servers, overlap {overlap}, "
                   f"mix {mix}", weights, average_fragments(problem, 23, h, count, overlap, mix, MOMENTUM))
        if count == 1:
            continue
        # Samples count once, whatever number of fragments they are pushed with: the last push has passed none.
        last = [line for line in lines if line["event"] == "apply"][-1]
        assert last["position"] == sum(len(problem.indices(rank, number)) for rank in range(workers) for number in range(23))


def same_bits(build, folder):
    """Fragments end in the same bits on any number of servers and any link, rounded or not, although each is taken while the
    worker trains on."""
    problem = Problem(3, 7)
    for wire in ([], ["--wire_dtype=e3m0", "--error_feedback", "--weights_wire_dtype=bfloat16"]):
        # Of gRPC's jobs one has its slices sent before their version is committed.
        flags = ["--stream=always", "--mode=diloco", "--local_steps=6", "--fragments=3", "--overlap=1", "--mix=0.5", *wire, *optimizer_flags(MOMENTUM)]
        ends = [train(build, folder, problem, 23, shards, flags, worker_flags)[0]
                for shards, worker_flags in ((1, []), (2, ["--shared_memory=off"]), (3, []))]
        for other in ends[1:]:
            assert all((one == two).all() for one, two in zip(ends[0], other, strict=True))


def fragments_without_a_barrier(build, folder):
    """One worker's differences, each a step of the outer momentum, are those of a barrier of one worker."""
    problem = Problem(1, 10)
    weights, _ = train(build, folder, problem, 23, 2,
                       ["--mode=diloco", "--outer_sync=async", "--dn_buffer=1", "--local_steps=6", "--fragments=3",
                        "--overlap=1", *optimizer_flags(MOMENTUM)])
    check_same("diloco in fragments without a barrier", weights,
               average_fragments(problem, 23, 6, 3, 1, 0.0, MOMENTUM))


def fragments_of_handed_out_runs(build, folder):
    """Whoever finds no run pushes empty contributions, of which a fragment's weights come back all the same."""
    for sync, link in (("barrier", "auto"), ("barrier", "off"), ("async", "off"), ("quorum", "auto")):
        weights, lines = train(build, folder, Problem(3, 7), 11, 2,
                               ["--mode=diloco", f"--outer_sync={sync}", *(["--quorum=2", "--quorum_grace=auto"] if sync == "quorum" else []), "--budget=job", "--stream=always", "--local_steps=4",
                                "--fragments=2", "--overlap=1", *optimizer_flags(MOMENTUM)],
                               [f"--shared_memory={link}"])
        assert all(np.isfinite(weight).all() for weight in weights)
        assert [line["event"] for line in lines][-1] == "end"


def diloco_async(build, folder):
    for workers, batch, flags, buffer in ((1, 10, ["--dn_buffer=3"], 3), (3, 7, [], 3)):
        problem = Problem(workers, batch)
        weights, lines = train(build, folder, problem, 11, 1,
                               ["--mode=diloco", "--outer_sync=async", "--local_steps=2", "--outer_momentum=0.6", *flags,
                                *optimizer_flags(MOMENTUM)])
        applied = [line for line in lines if line["event"] == "apply"]
        pushes = [(line["ranks"][0], line["version"] - 1 - line["staleness"][0]) for line in applied]
        first = [next(pulled for rank, pulled in pushes if rank == each) for each in range(workers)]
        # With the weights of a push its version is told, so here it is known with which version a rank began.
        check_same(f"diloco without a barrier, {workers} workers", weights,
                   delayed_nesterov(problem, 11, 2, MOMENTUM, 0.7, 0.6, buffer, pushes, first))


def diloco_quorum(build, folder):
    """Rounds are as the servers say, on one server and on two; with a quorum of all workers they are a barrier's."""
    for workers, batch, shards, quorum in ((3, 7, 1, 2), (4, 5, 2, 2), (3, 7, 2, 1)):
        problem = Problem(workers, batch)
        weights, lines = train(build, folder, problem, 53, shards,
                               ["--mode=diloco", "--outer_sync=quorum", f"--quorum={quorum}", "--quorum_grace=1ms",
                                "--local_steps=2", "--outer_momentum=0.6", *optimizer_flags(MOMENTUM)])
        applied = [line for line in lines if line["event"] == "apply"]
        rounds = [[(rank, line["version"] - 1 - staleness) for rank, staleness in zip(line["ranks"], line["staleness"])]
                  for line in applied]
        # Only where a quorum was not there for want of live workers is a round smaller.
        assert all(len(each) >= quorum for each in rounds[:-quorum]), rounds
        first = [next(pulled for pushes in rounds for rank, pulled in pushes if rank == each) for each in range(workers)]
        check_same(f"diloco, a quorum of {quorum} of {workers} workers, {shards} servers", weights,
                   in_rounds(problem, 53, 2, MOMENTUM, 0.7, 0.6, rounds, first))
    flags = ["--mode=diloco", "--local_steps=2", *optimizer_flags(MOMENTUM)]
    all_of_them = [train(build, folder, Problem(3, 7), 10, 2, [*flags, *more])[0]
                   for more in ([], ["--outer_sync=quorum", "--quorum=3", "--quorum_grace=10s"])]
    assert all((one == two).all() for one, two in zip(*all_of_them, strict=True))


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
    schedule = after_warmup(lambda x: (1 + np.cos(np.pi * x)) / 2, SAMPLES / 2, 4 * SAMPLES)
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
    problem = Problem(3, 7)
    weights, _ = train(build, folder, problem, 11, 3,
                       ["--mode=diloco", "--local_steps=6", "--fragments=2", "--overlap=1", *flags, *optimizer_flags(MOMENTUM)])
    check_same("diloco in fragments with a schedule", weights,
               average_fragments(problem, 11, 6, 2, 1, 0.0, MOMENTUM, schedule=schedule))
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


run_cases((local_sgd, local_sgd_gradients, diloco, diloco_fragments, same_bits,
           fragments_without_a_barrier, fragments_of_handed_out_runs, diloco_async, diloco_quorum, easgd, schedules,
           one_local_step_is_bsp))
