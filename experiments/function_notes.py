"""What the published parameters leave open, and what was cut, on the function experiment's page."""

from __future__ import annotations

from spread import mean

from .function_claims import averaged
from .function_results import Results
from .function_runs import INTERVALS, Plan, Setting
from .page import Section, Table

_PUBLISHED_EPOCHS = 8000  # The most that the source needed.
_SETTINGS = 4  # Two learning rates times two ways of counting.


def counting(setting: Setting) -> str:
    """When weights are averaged, in words."""
    count = setting.average_every.removesuffix("epochs")
    return f"every {count} {'epochs' if setting.average_every.endswith('epochs') else 'steps'}"


def choices(results: Results) -> Section:
    """Initial weights, and with them whether it trains at all."""
    plan = results.plan
    rows = []
    for choice in results.choices:
        outcome = choice.outcome
        said = f"fails: {outcome.diverged}" if outcome.diverged else f"loss {outcome.losses[-1][1]:.3f}"
        rows.append([f"`--init={choice.init}`", f"{choice.learning_rate:g}", said])
    text = (
        "The parameters as we have them name neither the optimizer nor the initial weights. The optimizer is SGD here. "
        "Initial weights are Glorot's, uniform within √(6 / (inputs + outputs)), and not He's, which are ps_worker's "
        "default: x goes up to 20 and is not scaled, and with larger weights the first gradients can be too large for "
        f"these learning rates. After {_epochs(plan.choice_epochs)}, gradients averaged after every batch:"
    )
    table = Table("Initial weights", ["initial weights", "learning rate", "outcome"], rows)
    return Section("What the parameters leave open", [text], [table])


def left_out(results: Results) -> Section:
    """What the whole would have been, what of it was run, and how long the whole would take."""
    plan = results.plan
    whole = _PUBLISHED_EPOCHS * len(INTERVALS) * _SETTINGS * 5
    seconds = [one.thousand_epochs_s[0] for each in results.code.values() for one in each if one.thousand_epochs_s]
    hours = whole / 1000 * (mean(seconds) or 0.0) / 3600
    text = (
        f"Every interval with both learning rates, both ways of counting and five seeds, for {_PUBLISHED_EPOCHS:,} "
        f"epochs each, is {whole:,} epochs, about {hours:.1f} hours at the speed measured here. Of these were run:"
    )
    return Section("What was cut", [text, "\n".join(f"- {line}" for line in _run(plan))])


def _run(plan: Plan) -> list[str]:
    seeds, leg = len(plan.seeds), _epochs(plan.leg_epochs)
    most = _epochs(plan.leg_epochs * max(plan.legs_max.values()))
    lines = [
        f"the code's setting (learning rate {plan.code.learning_rate:g}, weights averaged {counting(plan.code)}): "
        f"every interval with {seeds} seeds for {leg}, and the best of them on until the loss is under {plan.goal:g}, "
        f"for at most {most}. So there is one seed of each for the epochs until then;",
        f"the text's ({plan.text.learning_rate:g}, {counting(plan.text)}): {_intervals(tuple(plan.text_legs))} with "
        f"one seed for {leg}; where gradients are averaged after every batch, for "
        f"{_epochs(plan.leg_epochs * plan.text_legs[1])};",
        f"the code's learning rate with the text's counting: {_intervals(plan.mixed_intervals)}, where averaging "
        f"weights matters most, with one seed for {leg}; the text's learning rate with the code's counting: nothing;",
        f"times are of {leg}, of {plan.tcp_epochs} over TCP and of {plan.gloo_epochs} of the PyTorch program, scaled "
        "to a thousand;",
    ]
    if (plan.samples, plan.batch) != (80_000, 1_000):
        lines.append(f"this is the quick form: there are {plan.samples:,} samples, and batches of {plan.batch}.")
    return lines


def _epochs(count: int) -> str:
    return f"{count:,} epoch{'s' * (count != 1)}"


def _intervals(intervals: tuple[int, ...]) -> str:
    if set(intervals) == set(INTERVALS):
        return "every interval"
    return " and ".join(averaged(interval) for interval in intervals)
