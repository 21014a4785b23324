"""The modes that are compared: how they are written, what they do, and the rates that they get untuned."""

from __future__ import annotations

from dataclasses import dataclass

# What the number after the colon is, by mode; None: the mode takes none.
_NUMBER_FLAG = {
    "bsp": None,
    "asp": None,
    "ssp": "staleness",
    "backup": "backup_workers",
    "local_sgd": "local_steps",
    "diloco": "local_steps",
    "diloco_async": "local_steps",
    "easgd": "local_steps",
}
_LEAST = {"ssp": 0, "backup": 1, "local_sgd": 1, "diloco": 1, "diloco_async": 1, "easgd": 1}
TAKES_LOCAL_STEPS = ("local_sgd", "diloco", "diloco_async", "easgd")
ALL_WAIT = ("bsp", "local_sgd", "diloco")  # Each step, or each round, for the slowest.
NOBODY_WAITS = ("asp", "diloco_async", "easgd")
ALIASES = {"sync": "bsp", "async": "asp"}
_WORDS = {
    "bsp": "(sync) all workers wait for the slowest in each step, and one update is made of all their gradients. The "
    "others are compared with it.",
    "ssp": "a worker goes on by itself, until it is more than {number} steps ahead of the slowest. Each gradient is an "
    "update of its own.",
    "asp": "(async) nobody waits. Each gradient is an update of its own, on weights that others have changed since it "
    "was computed: the gradient is stale.",
    "backup": "an update is made as soon as all but {number} of the workers have sent their gradient. Later ones are "
    "thrown away.",
    "local_sgd": "each worker takes {number} steps by itself; then all wait for each other, and their weights are "
    "averaged.",
    "diloco": "each worker takes {number} steps by itself; then all wait for each other, and the servers step with the "
    "mean of what their weights have moved by, with a momentum of their own.",
    "diloco_async": "each worker takes {number} steps by itself; then the servers step with what its weights have "
    "moved by, with a momentum of their own. Nobody waits.",
    "easgd": "each worker takes {number} steps by itself; then its weights and the servers' are drawn towards each "
    "other. Nobody waits.",
}
_NUMBER_MAX = 1_000_000


@dataclass(frozen=True)
class Mode:
    """A mode of ps_server, with its number if it has one."""

    name: str
    number: int | None = None

    def __str__(self) -> str:
        """As on the command line: "ssp:2"."""
        return self.name if self.number is None else f"{self.name}:{self.number}"

    @property
    def id(self) -> str:
        """For names of files: "ssp_2"."""
        return str(self).replace(":", "_")

    @property
    def server_flags(self) -> list[str]:
        flag = _NUMBER_FLAG[self.name]
        mode = ["--mode=diloco", "--outer_sync=async"] if self.name == "diloco_async" else [f"--mode={self.name}"]
        return mode + ([] if flag is None else [f"--{flag}={self.number}"])

    def rate_of_samples(self, rate_of_bsp: float, workers: int) -> float:
        """The learning rate by which as many samples change the weights as much as in bsp, with the same momentum.

        A rate belongs to so many samples. bsp applies one update with the mean of N batches where asp and ssp make N
        updates of one batch each, so each of theirs gets an N-th of the rate. backup's update is the mean of N - B
        batches. In local_sgd, diloco and easgd workers step by themselves from about the same weights, and what N
        workers did is averaged: the rate is bsp's.
        """
        batches = {"asp": 1, "ssp": 1, "backup": workers - (self.number or 0)}.get(self.name, workers)
        return rate_of_bsp * batches / workers

    def untuned(
        self, rate_of_bsp: float, momentum: float, workers: int, staleness: int | None = None
    ) -> tuple[float, float]:
        """The learning rate and momentum without --tune, from bsp's. `staleness`: the enforced one; None: what the
        mode has, about `workers` - 1.

        Updates that are late act as momentum does, so asp and ssp get none besides; and from a staleness of 1 on, the
        effective rate, learning rate / (1 - momentum), goes down with it. This is what --tune has found for the
        default job (docs/compare.md has its command and its results).
        """
        rate = self.rate_of_samples(rate_of_bsp, workers)
        late = workers - 1 if staleness is None else staleness
        if self.name not in ("asp", "ssp") or late == 0:
            return rate, momentum
        return rate / (1 - momentum) * min(1, 2 / (1 + late)), 0.0


def parse_mode(text: str) -> Mode:
    """ValueError, with what is wrong."""
    name, colon, number = text.strip().partition(":")
    name = ALIASES.get(name, name)
    if name not in _NUMBER_FLAG:
        raise ValueError(
            f"unknown mode '{name}'; the modes are bsp, ssp:S, asp, backup:B, local_sgd:K, "
            "diloco:K, diloco_async:K and easgd:K"
        )
    flag = _NUMBER_FLAG[name]
    if flag is None:
        if colon:
            raise ValueError(f"'{text.strip()}': {name} takes no number")
        return Mode(name)
    if not number.isascii() or not number.isdigit() or not _LEAST[name] <= int(number) <= _NUMBER_MAX:
        raise ValueError(f"'{text.strip()}': expected {name}:N, with {flag} N from {_LEAST[name]} to {_NUMBER_MAX}")
    return Mode(name, int(number))


def family(mode: str) -> str:
    """The name of a mode that is written with its number, or as sync and async."""
    name = mode.partition(":")[0]
    return ALIASES.get(name, name)


def explained(mode: str) -> str:
    """What "ssp:2" does, in a sentence for those who have not heard of it; empty for a mode that is not known."""
    words = _WORDS.get(family(mode), "").format(number=mode.partition(":")[2])
    return words and f"{mode}: {words}"


# The enforced staleness, and the references, are one worker's pushes in asp.
ONE_BY_ONE = Mode("asp")
