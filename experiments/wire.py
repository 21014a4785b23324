"""The demo's training with gradients and weights in 16 bits, and with the largest hundredth of each gradient alone."""

from __future__ import annotations

from .lab import Lab
from .page import Page, Section
from .wire_page import accuracy, claims, curves, points
from .wire_runs import BATCH, MODEL, MOMENTUM, RATES, WHOLE, WORKERS, Outcome, epochs, seeds, train_all


def run(lab: Lab) -> Page:
    """Trains every form in every mode with every seed."""
    outcomes = train_all(lab)
    return Page(
        title="Half the bytes, and a hundredth: what accuracy they cost",
        finding=_finding(outcomes),
        lead=_lead(lab),
        expected=claims(outcomes),
        sections=[Section("Accuracy", [_forms()], [accuracy(outcomes)], [curves(outcomes)])],
    )


def _lead(lab: Lab) -> str:
    counts = [(len(seeds(lab, mode)), mode) for mode in RATES]
    count = " and ".join(f"{n} seed{'s' * (n > 1)} in `{mode}`" for n, mode in counts)
    rates = " and ".join(f"{rate} in `{mode}`" for mode, rate in RATES.items())
    return (
        f"The demo's job: {WORKERS} workers, `{MODEL}` on Fashion-MNIST in batches of {BATCH}, {epochs(lab):g} epochs, "
        f"SGD with a momentum of {MOMENTUM} at a learning rate of {rates}. Each form of what is sent runs with "
        f"{count}, and nothing is tuned for it: rates are those of float32."
    )


def _forms() -> str:
    return (
        "`bfloat16` sends gradients and weights rounded to 16 bits (`--wire_dtype`, `--weights_wire_dtype`); servers "
        "add up and keep float32. With `--error_feedback` workers add what rounding took away to their next gradient. "
        "Top-k (`--compress=topk:0.01`) sends the hundredth of each slice of a gradient that is largest, and keeps the "
        f"rest; workers apply the momentum before (`--momentum_correction={MOMENTUM}`), and servers plain SGD. Weights "
        "come back whole."
    )


def _finding(outcomes: list[Outcome]) -> str:
    worst = {}
    for one in outcomes:
        if one.form.name != WHOLE:
            kind = one.form.name.split(",")[0]
            lost = points(one, outcomes)[0]
            worst[kind] = min(worst.get(kind, lost), lost)
    said = ", ".join(f"{kind} {lost:+.2f}" for kind, lost in worst.items()).replace("-", "−")
    return f"Points of test accuracy from float32's, the least of all modes and forms: {said}.".replace(
        "top−k", "top-k"
    )
