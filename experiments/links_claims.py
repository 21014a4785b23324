"""What formulas say of parameter servers and collectives on slow links, beside what was measured."""

from __future__ import annotations

from .links_results import Results
from .links_systems import LOCAL_STEPS, WORKERS, by_name, theory
from .page import NOT_MEASURED, Claim

_BYTES_TOLERANCE = (
    0.15  # Headers are 5 %; the first and the last weights, and what servers tell the chief, are the rest.
)
_RATIO_TOLERANCE = 0.2
_BYTES = (
    ("bsp-1", f"models over the one server's link, each way, for a step of {WORKERS} workers (Li et al., 2014)"),
    (
        "bsp-4",
        "over the fullest link, with as many server hosts as workers (Jiang et al., 2020: 1 if all parts are equal)",
    ),
    ("bsp-4-colocated", "the same, with the servers on the workers' hosts"),
    ("mpi-ring", "the same, of a ring allreduce (Patarasuk and Yuan, 2009: 2·(n - 1)/n)"),
)


def finding(results: Results) -> str:
    """One sentence."""
    rate = 100 if 100 in results.rates else results.longest
    said = [
        f"{results.in_models(rate, 'bsp-1'):.1f} with one server",
        f"{results.in_models(rate, 'bsp-4'):.1f} with four",
    ]
    if best := results.best_mpi(rate):
        said.append(f"{results.in_models(rate, best):.1f} with MPI's best")
    return (
        f"A step over {rate:,} Mbit/s takes, in times that the model takes over a link, {', '.join(said)}; over "
        f"{results.slowest} Mbit/s local_sgd:{LOCAL_STEPS} passes {_gain(results):.1f} times as many batches as bsp."
    )


def claims(results: Results) -> list[Claim]:
    """Bytes first, then times."""
    found = [_of_bytes(results, name, what) for name, what in _BYTES]
    return [*found, _of_local_steps(results), *(_of_ring(results, rate) for rate in results.rates if rate <= 100)]


def _of_bytes(results: Results, name: str, what: str) -> Claim:
    moved, ours = theory(by_name(name), results.of), results.carried(name)
    assert moved is not None, name
    published = f"{moved.one_way:.2f}"
    if ours is None:
        return Claim(what, published, NOT_MEASURED, None, f"MPI is {results.no_mpi}.")
    agrees = -0.02 <= ours / moved.one_way - 1 <= _BYTES_TOLERANCE
    why = (
        f"Counted at the links, with {100 * (ours / moved.one_way - 1):.0f} % more than the weights and gradients "
        "alone: headers, and what begins and ends a training; up to 15 % are allowed."
        if agrees
        else f"It is {100 * (ours / moved.one_way - 1):+.0f} % off; 15 % more are allowed for headers and for what "
        "begins and ends a training."
    )
    return Claim(what, published, f"{ours:.2f}", agrees, why)


def _gain(results: Results) -> float:
    """Of local steps over bsp on the slowest links."""
    at = results.outcomes[results.slowest]
    return at["bsp-4"].batch_s / at["local-sgd-4"].batch_s


def _of_local_steps(results: Results) -> Claim:
    gain = _gain(results)
    agrees = abs(gain / LOCAL_STEPS - 1) <= _RATIO_TOLERANCE
    saved = results.carried("bsp-4") / results.carried("local-sgd-4")
    alone_ms = 1e3 * results.outcomes[results.longest]["local-sgd-4"].batch_s
    why = (
        f"At {results.slowest} Mbit/s; a fifth more or less is allowed. The links carried {saved:.1f} times less for "
        f"each batch, and at {results.longest:,} Mbit/s, where they matter little, a batch took {alone_ms:.1f} ms, "
        "computing included."
    )
    return Claim(
        f"averaging after {LOCAL_STEPS} local steps (Stich, 2019): batches in the time of one, where the link sets "
        "the pace",
        f"{LOCAL_STEPS}",
        f"{gain:.1f}",
        agrees,
        why,
    )


def _of_ring(results: Results, rate: int) -> Claim:
    what = f"{WORKERS} server hosts against a ring, over links of {rate:,} Mbit/s"
    published = "1.5 times as fast, by the bytes"
    ring, ours = results.of_system(rate, "mpi-ring"), results.of_system(rate, "bsp-4")
    if ring is None or ours is None:
        return Claim(what, published, NOT_MEASURED, None, f"MPI is {results.no_mpi}.")
    ratio = ring.batch_s / ours.batch_s
    agrees = ratio >= 1.5 * (1 - _RATIO_TOLERANCE)
    models = f"A step took the time of {results.in_models(rate, 'bsp-4'):.2f} models over a link, the ring's of "
    models += f"{results.in_models(rate, 'mpi-ring'):.2f}"
    why = (
        f"{models}; at least 1.2 times as fast counts as agreement. Each link carries the model once each way, and the "
        "ring's one and a half times."
        if agrees
        else f"{models}; at least 1.2 times as fast would count as agreement. For that, weights must be sent while "
        "gradients still arrive. Here a server sends weights when the step is complete, so that each link is used one "
        "way at a time, which is two models; the ring uses both ways from its beginning to its end."
    )
    return Claim(what, published, f"{ratio:.2f} times as fast", agrees, why)
