"""The same work by processes, by threads and by both on the same cores: what too many of them cost."""

from __future__ import annotations

from .lab import Lab
from .network import DESCRIPTION
from .page import Page, Section
from .processes_page import (
    PUBLISHED_S,
    Results,
    beside_published,
    claims,
    details,
    grid,
    published_longer,
    seconds,
    times_figure,
)
from .processes_runs import WORK, Setup, cores, first_batches, measure, rounds


def run(lab: Lab) -> Page:
    """Measures all products of processes and threads, and two variants."""
    results = Results(measure(lab))
    return Page(
        title="Processes and threads",
        finding=_finding(results),
        lead=_lead(lab),
        claims=claims(results),
        sections=[
            Section("Processes times threads", [_grid()], [grid(results)], [times_figure(results)]),
            Section("Beside the published times", [_published()], [beside_published(results)]),
            Section("Where the time goes", [_why(results)], [details(results)], notes=[_weights(results, lab)]),
        ],
    )


def _lead(lab: Lab) -> str:
    published = ", ".join(f"{PUBLISHED_S[count]} s with {count}" for count in sorted(PUBLISHED_S, reverse=True))
    by_turns = lab.pick(f"Every setup ran in {rounds(lab)} rounds, by turns", "Every setup ran in one round")
    return (
        "A published program trained a network by several processes on the cores of one machine, and took "
        f"{published}: the more processes, the slower. {DESCRIPTION}, with the mean gradient of all processes in each "
        f"step (`bsp`). The fixed work is {WORK:,} batches, of which each of N processes computes an Nth. It was not "
        f"run as a whole: a first run of {first_batches(lab)} batches decided how many a setup computed in each round, "
        f"and the time is scaled (the last table has the number). {by_turns}; times are means, with half of the 95 % "
        "interval. They begin after the first step, and are without starting and evaluating. All ran on "
        f"{cores()} cores, which the system divides among the processes and the server, and exchanged through shared "
        "memory where nothing else is said."
    )


def _grid() -> str:
    return (
        "Each of the processes is a worker with its own batches, which sends its gradient to the server; threads "
        "divide the matrix products of one batch (`--threads`). In brackets is how many times as long as the fastest "
        "of this table it takes."
    )


def _published() -> str:
    return (
        "How many threads each of the published processes had is not said. Libraries for matrix products start as "
        f"many as there are cores unless they are told otherwise, so here each process has {cores()}; `ps_worker` by "
        "itself has one."
    )


def _why(results: Results) -> str:
    most, every = results.processes[-1], cores()
    times = seconds(results.of(Setup(most, every))) / seconds(results.of(Setup(most, every, passive=True)))
    compared = f"{times:.1f} times as long as" if times >= 1 else f"{1 / times:.1f} times as fast as"
    return (
        "Threads that have divided a product wait until the last of them is done. Those of GNU OpenMP, which are used "
        "here, look again and again for a while, up to milliseconds, before they sleep, which is fast where each has a "
        "core of its own. Where another process needs that core, it is lost to looking, and the thread that is waited "
        "for may be the one without a core. Where a process has more threads than there are cores, they look for a "
        "much shorter while; but a process does not know of others, so those of several processes look longest where "
        "each process has as many threads as there are cores. What the looking costs is seen by turning it off "
        f"(`OMP_WAIT_POLICY=PASSIVE`): {most} processes of {every} threads took {compared} the same with threads that "
        "sleep at once. A handover is a thread's leaving its core to another while it could have gone on: because its "
        "time was up, or because it offered it, as those do who wait for the other side of shared memory. Those of "
        "starting are among them."
    )


def _weights(results: Results, lab: Lab) -> str:
    by_kind: dict[tuple[int, int], set[str]] = {}
    for one in results.found:
        by_kind.setdefault((one.setup.processes, one.setup.threads), set()).add(one.first_hash)
    same = all(len(hashes) == 1 for hashes in by_kind.values())
    said = "the same weights, bit for bit" if same else "DIFFERENT weights, which must not be"
    return (
        f"After the first run of {first_batches(lab)} batches as many processes with as many threads had {said}, over "
        "TCP as through shared memory, and however their threads waited."
    )


def _finding(results: Results) -> str:
    best, most, every = results.fastest.setup, results.processes[-1], cores()
    return (
        f"On {every} cores the fastest is {best.processes} process{'es' * (best.processes > 1)} of {best.threads} "
        f"thread{'s' * (best.threads > 1)}; {most} processes of {every} threads take "
        f"{results.longer(Setup(most, every), Setup(1, every)):.1f} times as long as one (published: "
        f"{published_longer(most):.1f}), {most} of one thread "
        f"{results.longer(Setup(most, 1), Setup(1, 1)):.2f} times."
    )
