"""The published figures of the digits experiment beside ours."""

from __future__ import annotations

import math

from .digits_results import MODEL_BYTES, Results
from .digits_runs import LINK, MEMORY
from .page import NOT_MEASURED, Claim

AGREEMENT = 1e-3  # Of costs, relative.
_ONE_SAMPLE = 1 / 5_000
_PROCESSES_OF_TWO = 3  # Two workers, and the server on the first one's machine.
_PUBLISHED_ITERATIONS = 1_000
_PUBLISHED_CPU_S = (0.55, 0.38)  # An iteration on one machine, and on two.
_PUBLISHED_GPU_S = (1.75, 1.00)
_PUBLISHED_LINK_MB_PER_S = 118.0
_RATIO_TOLERANCE = 0.2
_LINK_TOLERANCE = 0.1


def finding(results: Results) -> str:
    """One sentence."""
    said = []
    if results.curves:
        worst = max(map(results.deviation, results.curves))
        within = _rounded_up(worst)
        said.append(f"the cost is within {within} of NumPy's at each of {len(results.curves[0].cost):,} iterations")
    if results.speed_up is not None:
        ours = f"{results.speed_up:.2f} times as fast as one (published: {_ratio():.2f})"
        if _is_lower_bound(results):
            said.append(f"two hosts on one machine of {_cores(results)} are {ours}")
        else:
            said.append(f"two machines are {ours}")
    if results.filled is not None:
        said.append(f"an exchange moves {results.filled.exchange_bytes_per_s / 1e6:.0f} MB/s over 1 Gbit/s")
    text = "; ".join(said) or "the times of an iteration's parts on one host"
    return text[0].upper() + text[1:] + "."


def substitute(results: Results) -> str:
    """What is said where MNIST is not."""
    if results.digits.is_mnist:
        return ""
    return (
        f"\n\nMNIST is not on this machine. The times are of as many images of {results.digits.name}, which take as "
        "long; NumPy's training, which was on MNIST, is not repeated. MNIST's four IDX files belong in a folder "
        "`mnist` whose parent `--data_dir` names."
    )


def _rounded_up(value: float) -> str:
    """To two digits, so that "within" holds."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-6) * unit:.1e}"


def _is_lower_bound(results: Results) -> bool:
    """Whether the processes of two machines share cores, which on two machines they would not."""
    return results.cores < _PROCESSES_OF_TWO


def _cores(results: Results) -> str:
    return f"{results.cores} core{'s' * (results.cores > 1)}"


def claims(results: Results) -> list[Claim]:
    """Published, in the order of the page's parts."""
    return [*_of_other_digits(results), _of_cpus(results), _of_gpus(), _of_link(results)]


def beside_numpy(results: Results) -> list[Claim]:
    """What NumPy found on the same digits."""
    if not results.curves:
        missing = "MNIST is not on this machine."
        return [
            Claim("cost of the last iteration", "0.2065", NOT_MEASURED, None, missing),
            Claim("accuracy of the last iteration", "98.4 %", NOT_MEASURED, None, missing),
        ]
    curve = results.curves[0]
    last = len(curve.cost) - 1
    worst = max(map(results.deviation, results.curves))
    close = worst <= AGREEMENT
    cost_why = (
        f"All costs, with each number of workers, are within {_rounded_up(worst)} of NumPy's; {AGREEMENT:g} is "
        "allowed. The samples and the initial weights are the same; the arithmetic differs in rounding, since NumPy's "
        "trace is in float64, and this is in float32."
        if close
        else f"A cost is {worst:.1e} away from NumPy's; {AGREEMENT:g} is allowed. Nothing but rounding should differ."
    )
    found = [
        Claim(
            f"cost before iteration {last + 1:,}",
            f"{results.numpy.cost[last]:.4f}",
            f"{curve.cost[last]:.4f}",
            close,
            cost_why,
        )
    ]
    steps, _, theirs = results.accuracies(curve)[-1]
    ours = [results.accuracies(one)[-1][1] for one in results.curves]
    same = all(abs(each - theirs) <= _ONE_SAMPLE * 1.01 for each in ours)
    found.append(
        Claim(
            f"accuracy before iteration {steps + 1:,}",
            f"{100 * theirs:.2f} %",
            f"{100 * ours[0]:.2f} %",
            same,
            "On the 5,000 training samples, "
            + ("to within one sample with each number of workers." if same else "it differs by more than one sample."),
        )
    )
    return found


def _of_other_digits(results: Results) -> list[Claim]:
    """Of the whole training alone."""
    if not results.curves or len(results.curves[0].cost) < _PUBLISHED_ITERATIONS:
        return []
    curve = results.curves[0]
    cost, accuracy = curve.cost[_PUBLISHED_ITERATIONS - 1], results.accuracies(curve)[-1][1]
    why = "These were other digits: a reference, no target. Ours is that before the last iteration."
    after = f"after {_PUBLISHED_ITERATIONS:,} iterations"
    return [
        Claim(f"cost of the training samples, their mean cross-entropy, {after}", "0.25", f"{cost:.4f}", None, why),
        Claim(f"accuracy on the training samples {after}", "97 %", f"{100 * accuracy:.1f} %", None, why),
    ]


def _ratio() -> float:
    return _PUBLISHED_CPU_S[0] / _PUBLISHED_CPU_S[1]


def _of_cpus(results: Results) -> Claim:
    what = "an iteration on one machine and on two, CPUs"
    one_s, two_s = _PUBLISHED_CPU_S
    published = f"{one_s} → {two_s:.2f} s ({_ratio():.2f} times as fast)"
    one, two = results.timing(MEMORY, 1), results.timing(LINK, 2)
    if one is None or two is None or results.speed_up is None:
        return Claim(what, published, NOT_MEASURED, None, f"{_sentence(results.no_link)}")
    agrees: bool | None = abs(results.speed_up / _ratio() - 1) <= _RATIO_TOLERANCE
    least = _is_lower_bound(results)
    if least and results.speed_up < _ratio():
        agrees = None
    computed = [each.median_ms("forward") + each.median_ms("backward") for each in (one, two)]
    exchanged = [each.median_ms("exchange") for each in (one, two)]
    why = (
        "Compared are the ratios, which may differ by a fifth: the processors are others, so seconds cannot agree. "
        f"Computing, which each machine does on its share of the samples, went from {computed[0]:.2f} to "
        f"{computed[1]:.2f} ms; the exchange of {MODEL_BYTES / 1e3:.0f} KB each way, which one machine has in its own "
        f"memory, from {exchanged[0]:.2f} to {exchanged[1]:.2f} ms. The published iteration took "
        f"{1e3 * one_s / one.median_ms('total'):.0f} times as long as ours, so that as long an exchange weighed that "
        "much less in it."
    )
    halved = one.median_ms("total") / (one.median_ms("total") - computed[0] / 2)
    why += f" Half the computing, with the same exchange, would be {halved:.2f} times as fast."
    if least:
        why += (
            f" These are two hosts on one machine of {_cores(results)}, which two workers and the server share, so "
            "that this is the least that two machines have."
        )
    times = f"{'at least ' * least}{results.speed_up:.2f} times as fast"
    ours = f"{one.median_ms('total'):.2f} → {two.median_ms('total'):.2f} ms ({times})"
    return Claim(what, published, ours, agrees, why)


def _of_gpus() -> Claim:
    one_s, two_s = _PUBLISHED_GPU_S
    return Claim(
        "an iteration on one machine and on two, GPUs",
        f"{one_s} → {two_s:.2f} s ({one_s / two_s:.2f} times as fast)",
        NOT_MEASURED,
        None,
        "No GPU of this project's has run it.",
    )


def _of_link(results: Results) -> Claim:
    what, published = "what an exchange takes of a link of 1 Gbit/s", f"{_PUBLISHED_LINK_MB_PER_S:.0f} MB/s"
    if results.filled is None:
        return Claim(what, published, NOT_MEASURED, None, _sentence(results.no_link))
    ours = results.filled.exchange_bytes_per_s / 1e6
    stream = results.filled.stream_bytes_per_s / 1e6
    agrees = abs(ours / _PUBLISHED_LINK_MB_PER_S - 1) <= _LINK_TOLERANCE
    why = (
        "One worker's exchanges of 16 MiB each way: its iterations without forward and backward; it may differ by a "
        f"tenth. A plain TCP connection carried {stream:.0f} MB/s over this link, which counts IP's and TCP's headers "
        "and not all of Ethernet's: 118 MB/s are what TCP has left of 1 Gbit/s in packets of 1,500 bytes."
    )
    if not agrees:
        why += " The rest of an exchange's time is the server's update, and what is not sent while that goes on."
    return Claim(what, published, f"{ours:.0f} MB/s", agrees, why)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
