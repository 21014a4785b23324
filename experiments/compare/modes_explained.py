"""What each mode does, in a sentence for those who have not heard of it."""

from __future__ import annotations

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
    "easgd": "each worker takes {number} steps by itself; then its weights and the servers' are drawn towards each "
    "other. Nobody waits.",
}
_ALIASES = {"sync": "bsp", "async": "asp"}


def explained(mode: str) -> str:
    """Of "ssp:2"; empty for a mode that is not known."""
    name, _, number = mode.partition(":")
    words = _WORDS.get(_ALIASES.get(name, name))
    return "" if words is None else f"{mode}: {words.format(number=number)}"
