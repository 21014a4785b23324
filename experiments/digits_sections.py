"""The tables and plots of the digits experiment."""

from __future__ import annotations

from typing import Any

from figures import Figure
from spread import percentile

from .digits_results import MODEL_BYTES, OPERATIONS, Results
from .digits_runs import LINK, LINK_MBIT_PER_S, LINK_MODEL, MEMORY, PARTS, TIMED_WORKERS, Timing, elements
from .hosts import burst_bytes
from .page import NOT_MEASURED, SERIES, Section, Table, figure

CURVES = "Costs and accuracies beside NumPy's"
TIMES = "Milliseconds of an iteration, medians"
_COLOURS = ("compute", "idle", "push")  # Of PARTS.


def sections(results: Results) -> list[Section]:
    """In the page's order."""
    found = [_training(results)] if results.curves else []
    return [*found, _times(results), _link(results), _why(results)]


def _training(results: Results) -> Section:
    rows = []
    for curve in results.curves:
        last = len(curve.cost) - 1
        accuracies = "; ".join(
            f"{100 * ours:.2f} ({100 * theirs:.2f})" for _, ours, theirs in results.accuracies(curve)
        )
        rows.append(
            [
                str(curve.workers),
                f"{curve.cost[last]:.6f}",
                f"{results.numpy.cost[last]:.6f}",
                f"{results.deviation(curve):.1e}",
                accuracies,
            ]
        )
    steps = ", ".join(f"{number:,}" for number, _, _ in results.accuracies(results.curves[0]))
    columns = ["workers", "last cost", "NumPy's", "largest deviation", "accuracies, % (NumPy's)"]
    return Section(
        "The same training as NumPy's",
        [
            "Each worker computes the gradient of its share of the 5,000 samples, and the server steps with the mean "
            "over all samples, which is the gradient of the whole batch: with any number of workers it is the same "
            "training. The deviation is relative, the largest of all iterations; accuracies are on the training "
            f"samples, after {steps} iterations."
        ],
        [Table(CURVES, columns, rows)],
        [
            figure(
                "cost",
                "Cost over iterations",
                "The cost of one worker's training, and NumPy's drawn over it, which hides it where both are the same.",
                "iterations",
                "cost (logarithmic)",
                _draw_cost(results),
            )
        ],
    )


def _draw_cost(results: Results) -> Any:
    def draw(axes: Any, colours: dict[str, str]) -> None:
        ours = results.curves[0].cost
        axes.plot(ours, color=colours[SERIES[0]], linewidth=3.2, alpha=0.5, label="ours, 1 worker")
        axes.plot(results.numpy.cost[: len(ours)], color=colours[SERIES[1]], linewidth=1, label="NumPy")
        axes.set_yscale("log")
        axes.set_yticks([0.2, 0.5, 1, 2, 5], labels=["0.2", "0.5", "1", "2", "5"])
        axes.minorticks_off()

    return draw


def _times(results: Results) -> Section:
    columns = ["where", "workers", *PARTS, "total", "times as fast as one"]
    rows = [[one.place, str(one.workers), *_row(results, one)] for one in results.timings]
    if results.no_link:
        rows += [[LINK, str(number), *[NOT_MEASURED] * (len(PARTS) + 2)] for number in TIMED_WORKERS]
    notes = []
    if results.no_link:
        notes.append(f"Nothing was measured over links: {results.no_link}.")
    return Section(
        "Where an iteration's time goes",
        [
            "At a learning rate of 0.1 and without overlapping: a worker sends its gradients when all are computed, "
            "and begins the next iteration when it has all weights. `forward` includes gathering the samples, which "
            "are stored as bytes; a worker does that while the exchange before it is under way. `exchange` is the rest "
            "of the iteration, and so what is left of sending, waiting for the other workers and the server's step, "
            "and receiving. Medians over all workers' iterations but the first. The last column compares with one "
            "worker on one host through shared memory.",
            "Over links, the server runs on the first worker's host, as in a pair of machines; beside one worker "
            f"alone, on another one's. All processes share {results.cores} cores, so that more than "
            f"{results.cores} workers cannot compute faster, whatever they are connected by.",
        ],
        [Table(TIMES, columns, rows)],
        [_parts_figure(results), _iterations_figure(results)],
        notes,
    )


def _row(results: Results, one: Timing) -> list[str]:
    alone = results.timing(MEMORY, 1)
    parts = [f"{one.median_ms(part):.2f}" for part in (*PARTS, "total")]
    return [*parts, f"{alone.median_ms('total') / one.median_ms('total'):.2f}" if alone else "—"]


def _parts_figure(results: Results) -> Figure:
    def draw(axes: Any, colours: dict[str, str]) -> None:
        shown = results.timings[::-1]
        labels = [f"{one.place}: {one.workers}" for one in shown]
        left = [0.0] * len(shown)
        for part, colour in zip(PARTS, _COLOURS, strict=True):
            widths = [one.median_ms(part) for one in shown]
            axes.barh(labels, widths, left=left, color=colours[colour], label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.grid(visible=False, axis="y")

    return figure(
        "parts",
        "The parts of an iteration",
        "Medians of each part; behind the place, the number of workers.",
        "milliseconds",
        "",
        draw,
        height_inches=1.0 + 0.3 * len(results.timings),
        legend_columns=3,
        width_inches=6.4,
    )


def _iterations_figure(results: Results) -> Figure:
    shown = [one for one in results.timings if one.place == (LINK if results.filled else MEMORY)]

    def draw(all_axes: list[Any], colours: dict[str, str]) -> None:
        for axes, one in zip(all_axes, shown, strict=True):
            numbers = range(2, len(one.first_round) + 2)
            parts = [[1e3 * getattr(each, part) for each in one.first_round] for part in PARTS]
            shades = [colours[colour] for colour in _COLOURS]
            axes.stackplot(numbers, parts, labels=PARTS, colors=shades, step="mid", linewidth=0)
            axes.set_title(f"{one.workers} worker{'s' if one.workers > 1 else ''}", loc="left")
            axes.set_ylim(0, 1.2e3 * (percentile([each.total for each in one.first_round], 0.95) or 0))

    return figure(
        "iterations",
        f"Each iteration, {shown[0].place}",
        "The iterations of rank 0 in the first round, without the very first. Where a bar leaves the panel, something "
        "else had the processor.",
        "iteration",
        "ms",
        draw,
        height_inches=5.2,
        legend_columns=3,
        panels=len(shown),
        many_panels=True,
    )


def _link(results: Results) -> Section:
    model_bytes = 4 * elements(LINK_MODEL)
    text = (
        f"A worker and a server on two hosts exchange {model_bytes / 2**20:.0f} MiB each way in every iteration, of a "
        f"network `mlp:{','.join(map(str, LINK_MODEL))}` that computes next to nothing (batches of one sample). "
    )
    if results.filled is None:
        return Section("What an exchange takes of the link", [f"{text}Not measured: {results.no_link}."])
    ours, stream = results.filled.exchange_bytes_per_s, results.filled.stream_bytes_per_s
    rate, burst = LINK_MBIT_PER_S * 1e6 / 8, burst_bytes(LINK_MBIT_PER_S)
    rows = [
        ["a plain TCP connection, one way", f"{stream / 1e6:.1f}", f"{100 * stream / rate:.0f} %"],
        ["an exchange, there and then back", f"{ours / 1e6:.1f}", f"{100 * ours / rate:.0f} %"],
    ]
    columns = ["what", "MB/s", "of 1 Gbit/s"]
    return Section(
        "What an exchange takes of the link",
        [
            f"{text}Gradients go there, and when all have arrived, weights come back, so that one direction is used "
            "at a time: the rate is both directions' bytes over the exchange's time, the server's update included. "
            "As above, the exchange is what is left of an iteration without forward and backward. "
            f"({burst / 1e3:.0f} KB pass at once after a pause; that is {100 * burst / model_bytes:.1f} % of the "
            "model, by which an exchange may be faster than its bytes allow.)"
        ],
        [Table("Payload over a link of 1 Gbit/s", columns, rows)],
    )


def _why(results: Results) -> Section:
    alone = results.timing(MEMORY, 1)
    text = (
        f"The network has {MODEL_BYTES // 4:,} weights and biases, {MODEL_BYTES / 1e3:.0f} KB. An iteration takes "
        f"{OPERATIONS / 1e6:.0f} million multiplications and additions for all samples"
    )
    if alone:
        computing_ms = alone.median_ms("forward") + alone.median_ms("backward")
        text += f", for which one worker takes {computing_ms:.1f} ms, gathering the samples included"
    wire_ms = 1e3 * MODEL_BYTES / (LINK_MBIT_PER_S * 1e6 / 8)
    return Section(
        "Why: bytes and operations",
        [
            f"{text}. The gradients' bytes take {wire_ms:.2f} ms over 1 Gbit/s, and the weights' as much on their way "
            "back; on the link of the server's host each further worker adds the same. To this come a few switches "
            "between processes, and the chief's word for each step.",
            "So with W workers the computing is divided by W at best, while the exchange grows with W. For a small "
            "network like this one, few workers are the most that pays; the published programs, which took half a "
            "second for an iteration, had much more computing to divide for the same exchange.",
        ],
    )
