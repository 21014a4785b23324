"""The function experiment's published figures, and how ours compare with them."""

from __future__ import annotations

from collections.abc import Sequence

from spread import Ratio, paired_ratio

from .function_results import Results
from .function_runs import INTERVALS, NEVER, Training
from .page import Claim

PUBLISHED_S = {1: 330, 2: 183, 4: 136, 10: 99, NEVER: 88}  # For a thousand epochs.
PUBLISHED_EPOCHS = {1: 4000, 2: 6000, 4: 6000, 10: 7000, NEVER: 8000}  # Until the loss is under 0.05.
RATIO_APART_MAX = 0.1
EPOCHS_FACTOR_MAX = 1.5
SEEDS_FACTOR_MIN = 2


def how_often(interval: int) -> str:
    """When gradients are averaged, in words."""
    if interval == NEVER:
        return "never"
    return "after every batch" if interval == 1 else f"after every {interval}{'nd' if interval == 2 else 'th'} batch"


def averaged(interval: int) -> str:
    """The same with its subject."""
    return "gradients never averaged" if interval == NEVER else f"gradients averaged {how_often(interval)}"


def time_ratio(results: Results, interval: int) -> Ratio | None:
    """Of the time for as many epochs with this interval and with averaging after every batch; by seed, the first leg.

    None where one of them has diverged with every seed.
    """
    return paired_ratio(_times(results.code[interval]), _times(results.code[1]))


def _times(trainings: Sequence[Training]) -> dict[int, float]:
    return {one.seed: one.thousand_epochs_s[0] for one in trainings if one.thousand_epochs_s}


def claims(results: Results) -> list[Claim]:
    """All of them."""
    others = [interval for interval in INTERVALS if interval != 1]
    return [
        _order_of_times(results),
        *(_time(results, interval) for interval in others),
        *(_epochs(results, interval) for interval in INTERVALS),
        _learning_rate(results),
        _order_of_epochs(results),
        _seeds(results),
    ]


def _order_of_times(results: Results) -> Claim:
    ratios = [time_ratio(results, interval) for interval in INTERVALS]
    known = [ratio.mean for ratio in ratios if ratio is not None]
    agrees = known == sorted(known, reverse=True) if len(known) == len(INTERVALS) else None
    why = {
        True: "Each exchange that is left out saves what it costs, here as there.",
        False: "The order is not kept here; the seconds and their spread are in the table of times.",
        None: "Not all of them could be timed.",
    }
    return Claim(
        "the less often gradients are averaged, the less time as many epochs take",
        " > ".join(f"{PUBLISHED_S[interval]}" for interval in INTERVALS) + " s",
        ", ".join("—" if ratio is None else f"{ratio.mean:.2f}" for ratio in ratios) + " times the first",
        agrees,
        why[agrees],
    )


def _time(results: Results, interval: int) -> Claim:
    """Seconds are of different machines; what can be compared is the share of the time that is left."""
    published = PUBLISHED_S[interval] / PUBLISHED_S[1]
    ratio, never = time_ratio(results, interval), time_ratio(results, NEVER)
    what = f"time for as many epochs, {averaged(interval)}, over that after every batch"
    if ratio is None or never is None:
        return Claim(what, f"{published:.2f}", "diverged", None, "It could not be timed.")
    agrees = abs(ratio.mean - published) <= RATIO_APART_MAX
    there = 1 - PUBLISHED_S[NEVER] / PUBLISHED_S[1]
    shares = (
        f"Averaging after every batch takes {100 * (1 - never.mean):.0f} % of the time here, and took "
        f"{100 * there:.0f} % there, on another machine and by another program."
    )
    if agrees:
        why = f"The ratios are at most {RATIO_APART_MAX} apart. {shares}"
    elif ratio.mean > published:
        why = f"Leaving out exchanges saves less, since there is less to save. {shares}"
        if 1 - never.mean >= there:
            why = f"Leaving out these exchanges saves less of the time. {shares}"
    else:
        why = f"Leaving out these exchanges saves more of the time. {shares}"
    return Claim(what, f"{published:.2f}", _ratio_text(ratio), agrees, why)


def _ratio_text(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}"
    return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _epochs(results: Results, interval: int) -> Claim:
    training, published, plan = results.best(interval), PUBLISHED_EPOCHS[interval], results.plan
    reached = training.epochs_until(plan.goal)
    factor = f"a factor of {EPOCHS_FACTOR_MAX}"
    chance = (
        f"It is the one of {len(plan.seeds)} seeds that was best after {plan.leg_epochs:,} epochs, and the source says "
        "that its results vary greatly."
    )
    if reached is not None:
        ours = f"{reached:,g}"
        agrees: bool | None = published / EPOCHS_FACTOR_MAX <= reached <= published * EPOCHS_FACTOR_MAX
        side = f"More than {factor} {'fewer' if reached < published else 'more'}"
        why = f"{f'Within {factor}' if agrees else side}, with the code's setting. {chance}"
    else:
        ours, agrees, ended = _not_reached(training, published)
        why = f"{ended} {chance}"
    return Claim(
        f"epochs until the loss is under {plan.goal:g}, {averaged(interval)}", f"{published:,}", ours, agrees, why
    )


def _not_reached(training: Training, published: int) -> tuple[str, bool | None, str]:
    """What to say instead of epochs; the verdict; and why.

    None of it contradicts for want of epochs: until EPOCHS_FACTOR_MAX times as many as published, it might come under.
    """
    if training.diverged:
        return "diverged", False, f"It failed: {training.diverged}."
    ours = f"more than {training.epochs:,g}"
    loss = f"at a loss of {training.losses[-1][1]:.3g}"
    if training.stuck:
        loss += ", where it was stuck"
    enough = published * EPOCHS_FACTOR_MAX
    if training.epochs >= enough:
        return ours, False, f"After {training.epochs:,g} epochs it was {loss}."
    ended = f"Training ended at {training.epochs:,g} epochs, {loss}; {enough:,g} would be needed for a verdict."
    return ours, None, ended


def _learning_rate(results: Results) -> Claim:
    """The text's rate, with every gradient averaged, where nothing but the rate differs from the code's."""
    training, plan, published = results.text[1], results.plan, PUBLISHED_EPOCHS[1]
    reached, by_code = training.epochs_until(plan.goal), results.best(1).epochs_until(plan.goal)
    code = f"With {plan.code.learning_rate:g}, as in the published code, it is "
    code += "not under it either." if by_code is None else f"after {by_code:,g}."
    if reached is not None:
        ours = f"{reached:,g}"
        agrees: bool | None = published / EPOCHS_FACTOR_MAX <= reached <= published * EPOCHS_FACTOR_MAX
        why = f"{'Within' if agrees else 'Not within'} a factor of {EPOCHS_FACTOR_MAX}. {code}"
    else:
        ours, agrees, ended = _not_reached(training, published)
        why = f"{ended} {code}"
        if agrees is False and by_code is not None:
            why += " So the published epochs look like those of the code's rate."
    what = f"epochs until the loss is under {plan.goal:g}, {averaged(1)}, with the text's learning rate"
    return Claim(f"{what} of {plan.text.learning_rate:g}", f"{published:,}", ours, agrees, why)


def _order_of_epochs(results: Results) -> Claim:
    trainings = [results.best(interval) for interval in INTERVALS]
    reached = [training.epochs_until(results.plan.goal) for training in trainings]
    known = [epochs for epochs in reached if epochs is not None]
    # What did not come under it needs more than it was given.
    least = [training.epochs if at is None else at for training, at in zip(trainings, reached, strict=True)]
    agrees: bool | None = None
    if known != sorted(known):
        agrees = False
    elif known == reached[: len(known)] and least == sorted(least) and len(known) >= len(INTERVALS) - 1:
        agrees = True
    one_seed = (
        "It is one seed of each, the best one, and the loss jumps between evaluations, so that when it is first under "
        f"{results.plan.goal:g} is partly chance; below are all seeds after equally many epochs."
    )
    why = {
        True: f"Workers drift apart between two averagings, and what each learns is of its own samples. {one_seed}",
        False: f"The order is not kept. {one_seed}",
        None: "Too few of them came under it in the epochs that they were given.",
    }
    said = [f"{at:,g}" if at is not None else f"over {given:,g}" for at, given in zip(reached, least, strict=True)]
    return Claim(
        "the less often gradients are averaged, the more epochs it takes",
        ", ".join(f"{PUBLISHED_EPOCHS[interval]:,}" for interval in INTERVALS),
        ", ".join(said),
        agrees,
        why[agrees],
    )


def _seeds(results: Results) -> Claim:
    """Agrees where at least half of the intervals have seeds that differ by SEEDS_FACTOR_MIN."""
    at = results.plan.leg_epochs
    said, large, compared = [], 0, 0
    for interval in INTERVALS:
        losses = [loss for one in results.code[interval] if (loss := one.loss_at(at)) is not None]
        diverged = any(one.diverged for one in results.code[interval])
        if len(losses) < 2:
            continue
        compared += 1
        large += diverged or max(losses) >= SEEDS_FACTOR_MIN * min(losses)
        said.append(f"{min(losses):.3g} to {'diverged' if diverged else f'{max(losses):.3g}'}")
    agrees = 2 * large >= compared if compared else None
    return Claim(
        "results vary greatly from run to run",
        "so it says",
        f"after {at:,} epochs, {len(results.plan.seeds)} seeds: " + "; ".join(said),
        agrees,
        f"With {large} of {compared} intervals the largest loss is at least {SEEDS_FACTOR_MIN} times the smallest. "
        "A seed decides points and initial weights, and nothing else differs: with the same one, the same weights come "
        "out, bit for bit.",
    )
