"""The tables and plots of the links experiment."""

from __future__ import annotations

from typing import Any

from figures import Figure

from .hosts import burst_bytes
from .links_results import ALIKE_BATCHES, Results
from .links_runs import FREE, Outcome
from .links_systems import BATCH, LOCAL_STEPS, SYSTEMS, WORKERS, System, theory
from .page import NOT_MEASURED, SERIES, Section, Table, figure

BYTES = "Models over the fullest link, one way, for a batch of each worker"
TIMES = "Milliseconds of a batch, medians; in brackets, in times that the model takes over a link"
SPREAD = "The exchanges of all workers that were timed (MPI: of rank 0): how many; shortest to longest, ms of a batch"
MODES = "What exchanging less strictly and less often gains and costs"
ALIKE = "Losses and weights"
# With their colours.
_SHOWN_OVER_TIME = {"bsp-1": "quiet", "bsp-4": "bsp", "asp-1": "asp", "local-sgd-4": "local_sgd", "mpi-ring": "ssp"}


def sections(results: Results) -> list[Section]:
    """In the page's order."""
    return [_bytes(results), _times(results), _modes(results), _alike(results)]


def _all(results: Results) -> list[System]:
    """MPI too where it was not measured."""
    return list(SYSTEMS) if results.no_mpi else results.measured()


def _bytes(results: Results) -> Section:
    rows = []
    for system in _all(results):
        moved, carried = theory(system, results.of), results.carried(system.name)
        rows.append(
            [
                system.title,
                f"{moved.one_way:.2f}" if moved else "—",
                _missing(results, system) if carried is None else f"{carried:.2f}",
                f"{moved.one_way:.2f}" if moved else "—",
                f"{moved.in_turn:.2f}" if moved else "—",
            ]
        )
    columns = ["system", "theory", "counted", "least time, both ways at once", "least time, one way after the other"]
    share = results.of.fullest_share(4)
    return Section(
        "What a step must move",
        [
            "A worker sends a model of gradients and receives a model of weights. One server's link carries "
            f"{WORKERS} of each. Of four servers, the one with most has {100 * share:.1f} % of the model, so that a "
            f"server's link carries {WORKERS * share:.2f} models and a worker's 1. On the workers' hosts, a link "
            "carries three quarters as a worker's and about as much as a server's, and what a worker sends to its own "
            f"host crosses no link. In a ring of {WORKERS} each rank passes on {WORKERS - 1} quarters of the sum in "
            "the making, and then as many of the sum: one and a half models.",
            "A link carries as much in both directions at the same time. The least time of a step, in times that the "
            "model takes over a link, is the theory's figure if both directions are used from the beginning to the "
            "end; if servers send weights only when they have all gradients, separate servers take twice that. "
            f"Counted is what the fullest link carried at {results.longest:,} Mbit/s, with headers, beginning and end.",
        ],
        [Table(BYTES, columns, rows)],
    )


def _missing(results: Results, system: System) -> str:
    return f"MPI: {results.no_mpi}" if results.no_mpi and system.is_mpi else NOT_MEASURED


def _rate_name(rate: int | None) -> str:
    return "no limit" if rate is FREE else f"{rate:,} Mbit/s"


def _times(results: Results) -> Section:
    shown = list(results.outcomes)
    rows = []
    for system in _all(results):
        cells = []
        for rate in shown:
            outcome = results.of_system(rate, system.name)
            if outcome is None:
                cells.append(_missing(results, system))
            elif rate is FREE:
                cells.append(_ms(outcome))
            else:
                cells.append(f"{_ms(outcome)} ({results.in_models(rate, system.name):.2f})")
        rows.append([system.title, *cells])
    burst = burst_bytes(results.slowest)
    streams = ", ".join(
        f"{100 * one * 8 / (rate * 1e6):.0f} % of {rate:,} Mbit/s" for rate, one in sorted(results.streams.items())
    )
    return Section(
        "What a batch takes",
        [
            f"From a worker's batch to its next, computing included; of local_sgd:{LOCAL_STEPS}, an {LOCAL_STEPS}th "
            "of what a round takes. ps_worker overlaps sending with computing, as does the last kind of MPI, which "
            "sums each layer's gradients as soon as they are there; the other two sum all at once after the backward "
            "pass, by the algorithm that Open MPI chooses for this size, and by its ring. A plain TCP connection "
            f"carried {streams} between the same hosts. (At {results.slowest} Mbit/s {burst / 1e3:.0f} KB pass at once "
            f"after a pause; that is {100 * burst / results.of.model_bytes:.0f} % of the model, by which a step may be "
            "faster than its bytes allow.)"
        ],
        [Table(TIMES, ["system", *map(_rate_name, shown)], rows), _spread(results)],
        [_times_figure(results)],
    )


def _spread(results: Results) -> Table:
    """Of what the medians are."""
    table = Table(SPREAD, ["system", *map(_rate_name, results.outcomes)])
    for system in _all(results):
        cells = []
        for rate in results.outcomes:
            outcome = results.of_system(rate, system.name)
            if outcome is None:
                cells.append(_missing(results, system))
                continue
            least, most = (_milliseconds(of(outcome.periods_s)) for of in (min, max))
            cells.append(f"{len(outcome.periods_s)}: {least} to {most}")
        table.rows.append([system.title, *cells])
    return table


def _ms(outcome: Outcome) -> str:
    return _milliseconds(outcome.batch_s)


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _times_figure(results: Results) -> Figure:
    systems = results.measured()[::-1]

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for rate, colour in zip(results.outcomes, SERIES, strict=False):
            at = results.outcomes[rate]
            places = [place for place, system in enumerate(systems) if system.name in at]
            values = [1e3 * at[systems[place].name].batch_s for place in places]
            axes.plot(values, places, "o", color=colours[colour], markersize=6, label=_rate_name(rate))
        axes.set_yticks(range(len(systems)), labels=[system.title for system in systems])
        axes.set_xscale("log")
        axes.grid(visible=True, axis="x", which="both")

    return figure(
        "times",
        "What a batch takes",
        "Medians. The scale is logarithmic: where only links set the pace, dots of one row are a factor of ten apart.",
        "milliseconds",
        "",
        draw,
        height_inches=1.2 + 0.3 * len(systems),
        legend_columns=4,
        width_inches=6.4,
    )


def _modes(results: Results) -> Section:
    rows = []
    for name in ("bsp-1", "asp-1", "bsp-4", "local-sgd-4"):
        outcome = results.outcomes[results.longest][name]
        system = next(each for each in SYSTEMS if each.name == name)
        assert outcome.accuracy is not None, name
        found = [results.of_system(rate, name) for rate in results.rates]
        seconds = [_seconds(outcome.batches * one.batch_s) if one else NOT_MEASURED for one in found]
        rows.append([system.title, f"{100 * outcome.accuracy:.1f} %", *seconds])
    batches = results.outcomes[results.longest]["bsp-4"].batches
    columns = ["system", "test accuracy", *(f"s at {_rate_name(rate)}" for rate in results.rates)]
    return Section(
        f"What asp and local_sgd:{LOCAL_STEPS} do about it",
        [
            "asp moves as many bytes as bsp. But nobody waits for a step of all workers: one worker's gradients are "
            "under way while another one's weights are, so that both directions of the server's link are used at a "
            "time, and each push is a step of its own, here at a quarter of the learning rate. (With four servers it "
            "would save little: a worker's own link carries its gradients and then its weights, in asp as in bsp.) "
            f"local_sgd:{LOCAL_STEPS} exchanges once for {LOCAL_STEPS} batches. The accuracy is that after {batches} "
            f"batches of {BATCH} samples of each worker, of one run; the seconds are so many times a batch's median."
        ],
        [Table(MODES, columns, rows)],
        [_losses_figure(results)],
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _losses_figure(results: Results) -> Figure:
    rate = results.slowest
    shown = [system for system in SYSTEMS if system.name in _SHOWN_OVER_TIME and results.of_system(rate, system.name)]

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for system in shown:
            outcome, colour = results.outcomes[rate][system.name], colours[_SHOWN_OVER_TIME[system.name]]
            axes.plot(outcome.ends_s, outcome.losses, color=colour, linewidth=1.4, marker=".", label=system.title)

    return figure(
        "losses",
        f"Training loss over time, {rate} Mbit/s",
        f"A dot is a batch, the mean over workers. In local_sgd:{LOCAL_STEPS} each worker's is of its own weights, "
        "and the long lines are the exchanges.",
        "seconds since the first batch",
        "loss",
        draw,
        legend_columns=2,
        width_inches=6.4,
    )


def _alike(results: Results) -> Section:
    rows = []
    for system in _all(results):
        if not system.steps_alike:
            continue
        deviation, outcome = results.deviation(system.name), results.of_system(results.longest, system.name)
        if deviation is None or outcome is None:
            rows.append([system.title, _missing(results, system), _missing(results, system), "—"])
            continue
        samples = f"{outcome.batches * WORKERS * BATCH:,}"
        rows.append([system.title, samples, f"{deviation:.1e}", outcome.weights_hash[:8] or "—"])
    equal = "are equal, bit for bit" if len(results.bsp_hashes()) == 1 else "DIFFER, which they must not"
    return Section(
        "It is the same training",
        [
            "In bsp and in MPI each step is that of one batch of all workers, on the same samples from the same "
            f"weights. The weights of bsp with one and four servers, wherever these are, {equal}. MPI sums in another "
            "order, so that its losses differ by rounding, and the more the longer it trains; the largest relative "
            f"deviation from bsp's with one server in the first {ALIKE_BATCHES} batches:"
        ],
        [Table(ALIKE, ["system", "samples", "deviation", "weights hash"], rows)],
    )
