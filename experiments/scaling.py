"""Fixed work with 1, 2, 4 and 8 workers: on cores of their own as far as there are any, and in idle-time form."""

from __future__ import annotations

from .lab import Lab
from .network import BATCH, DESCRIPTION
from .page import NOT_MEASURED, Claim, Page, Section
from .scaling_page import PUBLISHED_S, Point, Results, claims, details, overview, speed_up_figure
from .scaling_runs import (
    BUSY_SHARE,
    PLAYED_BATCHES,
    STAND_IN,
    Measured,
    Setup,
    cores,
    measure,
    measure_compute,
    passes,
    rounds,
    step_time,
    workers,
)


def run(lab: Lab) -> Page:
    """Measures what a batch takes to compute, then all setups by turns."""
    compute_s = {batch: measure_compute(lab, batch) for batch in PLAYED_BATCHES}
    found = measure(lab, compute_s)
    results = Results(found)
    lines = [(line, results.line(line)) for line in results.lines]
    real = [(line, points) for line, points in lines if not line.idle]
    idle = [(line, points) for line, points in lines if line.idle]
    return Page(
        title="Scaling",
        finding=_finding([(line, points) for line, points in [*idle, *real] if not line.shared_memory]),
        lead=_lead(lab),
        claims=[_gpus(), _seconds(found), *(each for line, points in [*idle, *real] for each in claims(line, points))],
        sections=[
            Section(
                "All forms",
                tables=[overview(results, workers(lab))],
                figures=[speed_up_figure(results, workers(lab))],
                notes=[_FORMS],
            ),
            Section("Idle-time form", _idle(compute_s), [details(line, points) for line, points in idle]),
            Section("Real cores", [_real()], [details(line, points) for line, points in real], notes=[_weights(found)]),
        ],
    )


_FORMS = (
    'A speed-up is the time of one worker of the same form over that of so many workers. "No cores": the machine has '
    "not that many. Nothing here ran on a GPU, and several workers on one card would not be several GPUs."
)


def _lead(lab: Lab) -> str:
    seconds = ", ".join(str(seconds) for seconds in PUBLISHED_S.values())
    by_turns = lab.pick(f"Every setup ran {rounds(lab)} times, by turns", "Every setup ran once")
    return (
        f"A published program trained a network on 1, 2, 4 and 8 GPUs, with a fixed amount of work, in {seconds} s: 1, "
        f"1.91, 3.75 and 6.74 times as fast as one. {DESCRIPTION}, with the mean gradient of all workers in each step "
        f"(`bsp`). The fixed work is here {passes(lab)} passes over the data: {passes(lab) * 80:,} batches of 1,000 "
        f"samples, or as many samples in larger batches, of which each of N workers computes an Nth. {by_turns}; a "
        "speed-up is the mean of the rounds', in brackets its 95 % interval. Times begin after the first step, and are "
        "without starting and evaluating."
    )


def _idle(compute_s: dict[int, float]) -> list[str]:
    measured = " and ".join(f"{1000 * compute_s[batch]:.2f} ms for {batch:,} samples" for batch in PLAYED_BATCHES)
    given = " and ".join(f"`--experiment_step_time={step_time(compute_s[batch])}`" for batch in PLAYED_BATCHES)
    return [
        "Here waiting plays the cores that the machine does not have. A worker that ran alone, on a core of its own, "
        f"computed a batch, forward and backward, in {measured} (medians). In this form every worker computes a batch "
        f"of {STAND_IN} samples as a stand-in, idles until that time is over ({given}), and only then pushes its "
        "gradient. What is exchanged has the same size for any batch, and is really exchanged. So the workers need "
        f"cores for the exchange, and hardly for computing. Batches of {PLAYED_BATCHES[1]:,} are not the "
        "published ones: they show the same exchange beside ten times as much computing.",
        "Two things differ from real cores: an idling worker sends nothing before its whole batch is over, while a "
        "computing one sends each layer's gradient as soon as it is there; and idling ends some hundredths of a "
        "millisecond late, which the tables show as computing.",
        f"In `bsp` all workers exchange at the same time, and here share {len(cores())} cores for it. The tables say "
        "how busy a job's processes kept all cores, on the whole and if only the rest of a step counts, in which "
        f"nobody computes. Above {BUSY_SHARE:.0%} of the latter the cores and not the system may have set the pace: "
        "the speed-up is a lower bound of what so many machines have, and is compared only where it is not below the "
        "published one. With shared memory that is a strict measure, since who waits for the other side looks again "
        "and again for up to a millisecond before it sleeps, and lets others run meanwhile.",
    ]


def _real() -> str:
    return (
        f"Each worker is bound to a core of its own, of the machine's {len(cores())}. The server either has another "
        "core to itself, so that there is one less for workers, or it runs on the workers' cores and nowhere else, so "
        "that one worker shares its one core with it, and the speed-up of several, who have fewer cores than they and "
        "the server need, is called a lower bound. Sending overlaps with computing here, as it does by default: "
        "what a worker sends while it computes counts as computing."
    )


def _weights(found: list[Measured]) -> str:
    by_workers: dict[int, set[str]] = {}
    for one in found:
        if not one.setup.idle:
            by_workers.setdefault(one.setup.workers, set()).update(one.hashes)
    same = all(len(hashes) == 1 for hashes in by_workers.values())
    said = "the same weights, bit for bit" if same else "DIFFERENT weights, which must not be"
    hashes = "; ".join(f"{number}: {', '.join(sorted(hashes))}" for number, hashes in sorted(by_workers.items()))
    return f"Wherever the server ran, and by whatever way, as many workers ended with {said} (workers: hash; {hashes})."


def _gpus() -> Claim:
    published = "; ".join(f"{seconds} s on {number}" for number, seconds in PUBLISHED_S.items())
    why = "The machine's GPUs, if it has any, were not used; workers that share one card would not be several GPUs."
    return Claim("the same on 1, 2, 4 and 8 GPUs", published, NOT_MEASURED, None, why)


def _seconds(found: list[Measured]) -> Claim:
    one = next(each for each in found if not each.setup.idle or each.setup.batch == BATCH)
    seconds = sum(one.seconds) / len(one.seconds)
    why = (
        "Other hardware, another program, and a number of passes that was not published with the times: seconds "
        "cannot agree, so ratios are compared. The published 6.74 is not 934 over 139, which is 6.72."
    )
    return Claim("seconds of one worker", f"{PUBLISHED_S[1]} s (one GPU)", f"{seconds:.1f} s (one core)", None, why)


def _finding(lines: list[tuple[Setup, list[Point]]]) -> str:
    found = []
    for line, points in lines:
        last = points[-1]
        if last.workers > 1:
            least = "at least " if last.at_least else ""
            played = "played by idling" if line.idle else "on real cores"
            found.append(f"{least}{last.speed_up.mean:.2f} with {last.workers} {played}, batch {line.batch:,}")
    return f"Speed-ups over TCP: {'; '.join(found)} (published: 6.74 with 8 GPUs, 1.91 with 2)."
