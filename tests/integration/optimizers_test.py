"""The servers' optimizers, against a program in NumPy that computes in double precision and straight from the definitions:
after 200 steps with groups of parameters, a schedule and clipped gradients, the weights that the real programs save are
those that it ends with, up to what float32 rounds off.

    optimizers_test.py BUILD_FOLDER [CASE...]

Skipped (a line that begins with SKIPPED:) where NumPy is not there.
"""
import collections
import fnmatch
import functools

from simulation import (NAMES, SAMPLES, TOLERANCE, WIDTHS, Problem, after_warmup, apart, check_same, make_weights, mean, np,
                        run_cases, train)


# ---- The definitions. An optimizer keeps the state of one tensor; a step returns the tensor's next weights.

class Nesterov:
    def __init__(self, shape, momentum):
        self.momentum, self.velocity = momentum, np.zeros(shape)

    def step(self, w, g, rate, decay):
        g = g + decay * w
        self.velocity = self.momentum * self.velocity + g
        return w - rate * (g + self.momentum * self.velocity)


class Adam:
    def __init__(self, shape, beta1, beta2, eps):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.m, self.v, self.steps = np.zeros(shape), np.zeros(shape), 0

    def direction(self, g):
        self.steps += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m_hat = self.m / (1 - self.beta1**self.steps)
        v_hat = self.v / (1 - self.beta2**self.steps)
        return m_hat / (np.sqrt(v_hat) + self.eps)

    def step(self, w, g, rate, decay):
        return w - rate * self.direction(g + decay * w)


class AdamW(Adam):
    def step(self, w, g, rate, decay):
        return w - rate * decay * w - rate * self.direction(g)


class Lamb(Adam):
    """You et al., 2020, algorithm 2."""

    def step(self, w, g, rate, decay):
        update = self.direction(g) + decay * w
        norms = np.linalg.norm(w), np.linalg.norm(update)
        trust_ratio = norms[0] / norms[1] if all(norms) else 1.0
        return w - rate * trust_ratio * update


# ---- Schedules: the factor of the learning rate by position, in samples, and the flags. Jobs go on after the lengths.

def step_down(position):
    return 0.5**(position // (15 * SAMPLES))


COSINE = (after_warmup(lambda x: 0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2, 10 * SAMPLES, 60 * SAMPLES),
          ["--schedule=cosine", "--warmup=10epochs", "--schedule_length=60epochs", "--schedule_end=0.1"])
STEP = step_down, ["--schedule=step", "--schedule_step=15epochs", "--schedule_gamma=0.5"]
LINEAR = (after_warmup(lambda x: 1 - 0.8 * x, 0, 2500),
          ["--schedule=linear", "--schedule_length=2500samples", "--schedule_end=0.2"])
POLYNOMIAL = (after_warmup(lambda x: 0.05 + 0.95 * (1 - x)**2, 100, 3000),
              ["--schedule=polynomial", "--warmup=100samples", "--schedule_length=3000samples", "--schedule_end=0.05",
               "--schedule_power=2"])


# ---- Clipping: what becomes of the gradients of all tensors before the optimizer sees them

def clip_value(gradients, limit):
    return [np.clip(g, -limit, limit) for g in gradients]


def clip_norm(gradients, limit):
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    return [min(1, limit / (norm + 1e-6)) * g for g in gradients]


def clip_tensor_norm(gradients, limit):
    return [clip_norm([g], limit)[0] for g in gradients]


class Clip:
    """By --clip_value, --clip_tensor_norm and --clip_norm, in this order. Counts the steps that each has an effect in."""

    def __init__(self, limits):
        self.limits, self.effects = limits, dict.fromkeys(limits, 0)
        self.flags = [f"--{name}={limit}" for name, limit in limits.items()]

    def __call__(self, gradients):
        for function in (clip_value, clip_tensor_norm, clip_norm):
            if limit := self.limits.get(function.__name__):
                before, gradients = gradients, function(gradients, limit)
                self.effects[function.__name__] += apart(before, gradients) > 0
        return gradients


# ---- The simulation

class Groups:
    """What --decay_biases=false and --param_groups make of each tensor: (factor of the rate, factor of the decay)."""

    def __init__(self, groups, decay_biases):
        self.factors = []
        for name, weight in zip(NAMES, make_weights(), strict=True):
            rate, decay = 1.0, 1.0 if decay_biases or weight.ndim > 1 else 0.0
            named = [factors for pattern, factors in groups if fnmatch.fnmatchcase(name, pattern)]
            if named:
                rate, decay = named[-1].get("learning_rate", rate), named[-1].get("weight_decay", decay)
            self.factors.append((rate, decay))
        text = ";".join(pattern + ":" + ",".join(f"{name}={value}" for name, value in factors.items())
                        for pattern, factors in groups)
        self.flags = [f"--param_groups={text}", f"--decay_biases={str(decay_biases).lower()}"]


def simulate(problem, steps, make_optimizer, rate, decay, groups, schedule, clip):
    """The weights after so many steps on the mean gradients of all ranks, each with the rate times schedule(samples passed
    before it)."""
    weights = [weight.astype(float) for weight in make_weights(problem.widths)]
    optimizers = [make_optimizer(weight.shape) for weight in weights]
    passed = 0
    for step in range(steps):
        terms = []
        for rank in range(problem.workers):
            indices = problem.indices(rank, step)
            terms.append((problem.gradient(weights, indices) if indices else None, len(indices)))
        gradients, scheduled = clip(mean(terms)), rate * schedule(passed)
        passed += sum(samples for _, samples in terms)
        weights = [optimizer.step(w, g, scheduled * rate_factor, decay * decay_factor) for optimizer, w, g,
                   (rate_factor, decay_factor) in zip(optimizers, weights, gradients, groups.factors, strict=True)]
    return weights


# ---- Cases

BIASES_ALONE = Groups([("layer?.bias", {"learning_rate": 0.25}), ("layer1.*", {"learning_rate": 2, "weight_decay": 0.5})],
                      decay_biases=False)
LAST_COUNTS = Groups([("*", {"learning_rate": 0.5, "weight_decay": 3}), ("*0.weight", {"learning_rate": 1.5})],
                     decay_biases=True)

Job = collections.namedtuple("Job", "mode workers batch shards steps widths")
# With 1 and 3 servers, in bsp; and with one worker that takes the steps itself, which local_sgd then averages.
JOBS = (Job("bsp", 2, 11, 1, 200, WIDTHS), Job("bsp", 3, 7, 3, 200, WIDTHS), Job("local_sgd", 1, 22, 1, 200, WIDTHS))
# Both matrices are so large that each is cut into two slices, which two servers hold.
OF_SLICES = Job("bsp", 3, 7, 3, 12, (4, 100_000, 3))


def check(build, folder, name, make_optimizer, rate, decay, groups, schedule, limits, flags=(), jobs=JOBS):
    factor, schedule_flags = schedule
    for job in jobs:
        problem, clip = Problem(job.workers, job.batch, job.widths), Clip(limits)
        mode_flags = ["--local_steps=7"] if job.mode == "local_sgd" else []
        weights, _ = train(build, folder, problem, job.steps, job.shards,
                           [f"--mode={job.mode}", *mode_flags, f"--optimizer={name}", f"--learning_rate={rate}",
                            f"--weight_decay={decay}", *schedule_flags, *clip.flags, *flags], groups.flags)
        end = functools.partial(simulate, problem, job.steps, make_optimizer, rate, decay, groups)
        expected = end(factor, clip)
        check_same(f"{name}, {job.mode}, {job.workers} workers, {job.shards} servers", weights, expected, job.widths)
        # Each limit matters, but not always; and without it, or without the schedule, the weights would end elsewhere.
        assert all(0.2 < effects / job.steps < 0.8 for effects in clip.effects.values()), clip.effects
        others = [end(lambda _: 1.0, Clip(limits))]
        others += [end(factor, Clip({kept: limits[kept] for kept in limits if kept != left_out})) for left_out in limits]
        for other in others:
            assert apart(other, expected) > 100 * TOLERANCE * apart(expected, make_weights(job.widths))


def nesterov(build, folder):
    check(build, folder, "nesterov", lambda shape: Nesterov(shape, 0.8), 0.02, 0.03, BIASES_ALONE, COSINE,
          {"clip_value": 0.2, "clip_tensor_norm": 0.3, "clip_norm": 0.4}, ["--momentum=0.8"])


def adam(build, folder):
    check(build, folder, "adam", lambda shape: Adam(shape, 0.85, 0.98, 1e-6), 0.01, 0.02, BIASES_ALONE, STEP,
          {"clip_value": 0.2}, ["--beta1=0.85", "--beta2=0.98", "--eps=1e-6"])


def adamw(build, folder):
    check(build, folder, "adamw", lambda shape: AdamW(shape, 0.9, 0.999, 1e-8), 0.01, 0.3, LAST_COUNTS, LINEAR,
          {"clip_tensor_norm": 0.3})


def lamb(build, folder):
    check(build, folder, "lamb", lambda shape: Lamb(shape, 0.9, 0.999, 1e-6), 0.02, 0.1, LAST_COUNTS, POLYNOMIAL,
          {"clip_norm": 0.4})


def lamb_of_slices(build, folder):
    check(build, folder, "lamb", lambda shape: Lamb(shape, 0.9, 0.999, 1e-6), 0.002, 0.1, LAST_COUNTS, POLYNOMIAL,
          {"clip_tensor_norm": 35}, jobs=[OF_SLICES])


run_cases((nesterov, adam, adamw, lamb, lamb_of_slices))
