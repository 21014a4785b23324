"""Data that no machine has whole: Fashion-MNIST cut in four, beside the whole."""

from __future__ import annotations

from spread import Interval, paired_difference

from .lab import Lab
from .own_data_cuts import BATCH, RANKS, SMALL_PART
from .own_data_page import accuracy, accuracy_figure, contributions_figure, of, parts, points
from .own_data_runs import (
    EPOCHS,
    LEARNING_RATE,
    MODEL,
    MODES,
    WHOLE,
    Data,
    Exact,
    Outcome,
    contributions,
    epochs_of,
    prepare,
    refusal,
    seeds,
    steps_of_epoch,
    train_exact,
    train_shuffled,
)
from .page import Claim, Page, Section

MARGIN = 0.01  # By so much accuracies of the same samples in another order may differ.
ROUNDING = 1e-5  # Relative, of a step's loss, where statistics are added up in another order.


def run(lab: Lab) -> Page:
    """Cuts, trains all, and compares."""
    data = prepare(lab)
    exact = [train_exact(lab, data, normalize) for normalize in ("none", "standard")]
    outcomes = train_shuffled(lab, data)
    steps = contributions(lab, data, "uneven")
    return Page(
        title="Data that no machine has whole",
        finding=_finding(exact[0], outcomes),
        lead=_lead(data),
        expected=[
            _same_weights(exact[0]),
            _same_statistics(exact[1]),
            _same_accuracy(outcomes),
            _all_samples_once(data, steps),
        ],
        sections=[
            Section("The cuts", [_cuts(data)], [parts(data)]),
            Section("How well they learn", [_learning(lab)], [accuracy(outcomes)], [accuracy_figure(outcomes)]),
            Section(
                "Uneven parts",
                [_running_out(data, steps)],
                figures=[contributions_figure(steps, steps_of_epoch(data, "uneven"))],
            ),
            Section("What is refused", _refused(lab, data)),
        ],
    )


def _finding(exact: Exact, outcomes: list[Outcome]) -> str:
    same = "the same weights as" if len(set(exact.hashes)) == 1 else "OTHER weights than"
    found = _difference(outcomes, "by class", "asp")
    return (
        f"Four workers whose files hold what each takes of the whole get {same} from the whole; where each lacks most "
        f"classes, bsp is {points(_difference(outcomes, 'by class', 'bsp'))} points from the whole, and asp "
        f"{points(found)}."
    )


def _lead(data: Data) -> str:
    return (
        "With `--data=own` each worker reads files that it alone has; nobody reads, or sends, another's samples. What "
        "the samples must have in common is told to the chief when workers join: the number of features, the classes, "
        "and the statistics by which all scale alike. Here the "
        f"{len(data.train):,} training images of Fashion-MNIST are cut in four. The network is `{MODEL}`, trained by "
        f"SGD at {LEARNING_RATE:g} in batches of {BATCH} a worker, for {EPOCHS} epochs. Only the lead evaluates, so it "
        "alone has the test files. Nothing was published elsewhere: what is expected is what the flag promises."
    )


def _same_weights(exact: Exact) -> Claim:
    same = exact.hashes[0] == exact.hashes[1]
    said = f"equal, bit for bit: {exact.hashes[0]}" if same else f"{exact.hashes[0]} and {exact.hashes[1]}"
    why = (
        f"In bsp gradients are added in the order of ranks, and in all {exact.steps} steps every rank had the samples "
        "that it takes of the whole."
        if same
        else f"The weights differ; the losses of a step by {exact.apart:.1e} at most. Nothing should differ."
    )
    return Claim("weights of files in the ranks' order, and of the whole", "equal, bit for bit", said, same, why)


def _same_statistics(exact: Exact) -> Claim:
    close = exact.apart <= ROUNDING
    bits = "bits are" if len(set(exact.hashes)) == 1 else "last bits are not"
    why = (
        "Each pixel is scaled by its mean and deviation over all workers' samples, of which each worker tells its "
        f"own part. Losses of a step may differ by {ROUNDING:g} of their value, since what is added up in another "
        f"order may be rounded otherwise; here the weights' {bits} the same."
    )
    return Claim(
        "the same with --normalize=standard",
        "equal but for rounding",
        f"the losses of a step differ by {exact.apart:.1e} at most" if exact.apart else "the losses are equal",
        close,
        why if close else f"The losses differ by more than {ROUNDING:g}, which rounding does not explain.",
    )


def _difference(outcomes: list[Outcome], cut: str, mode: str) -> float:
    """From the whole, in points of test accuracy: the mean over the seeds."""
    return 100 * _paired(outcomes, cut, mode).mean


def _paired(outcomes: list[Outcome], cut: str, mode: str) -> Interval:
    """The same as a share, with its 95 % interval, seed by seed."""
    found = paired_difference(of(outcomes, cut, mode).accuracy, of(outcomes, WHOLE, mode).accuracy)
    assert found is not None  # Both have the same seeds.
    return found


def within_margin(found: Interval, margin: float) -> bool | None:
    """Whether the truth is at most so far from 0; None where the interval has both."""
    if found.low is None or found.high is None:
        return None
    if found.low > margin or found.high < -margin:
        return False
    return True if -margin <= found.low and found.high <= margin else None


def _same_accuracy(outcomes: list[Outcome]) -> Claim:
    """Decided by the 95 % interval of the difference."""
    found = _paired(outcomes, "quarters", "bsp")
    agrees = within_margin(found, MARGIN)
    if found.low is None or found.high is None:
        ours, said = f"{points(100 * found.mean)} points", "One seed has no interval."
    else:
        interval = f"{points(100 * found.low)} to {points(100 * found.high)}"
        ours = f"{points(100 * found.mean)} points ({interval})"
        said = {
            True: "All of the interval is within the margin.",
            False: "All of the interval is beyond the margin.",
            None: f"The interval of {found.count} seeds reaches beyond the margin: more of them would be needed.",
        }[agrees]
    why = (
        f"In brackets the 95 % interval, seed by seed; {100 * MARGIN:g} point either way is allowed. {said} "
        "Samples come in another order, since each worker shuffles its own: an update has as many of each quarter."
    )
    return Claim("test accuracy of shuffled quarters, bsp", "the whole's", ours, agrees, why)


def _all_samples_once(data: Data, steps: list[list[int]]) -> Claim:
    epochs = epochs_of(steps, steps_of_epoch(data, "uneven"))
    has = [len(indices) for indices in data.parts["uneven"]]
    used = [[sum(step[rank] for step in epoch) for rank in range(RANKS)] for epoch in epochs]
    agrees = len(epochs) == EPOCHS and all(each == has for each in used)
    counts = ", ".join(f"{samples:,}" for samples in has)
    why = (
        "By the server's metrics, which list what each update is made of."
        if agrees
        else f"By the server's metrics they used {used}."
    )
    return Claim(
        "samples that each rank contributes in an epoch, uneven parts, bsp",
        "all that it has, once",
        f"{counts} in each of {EPOCHS} epochs" if agrees else "not those",
        agrees,
        why,
    )


def _cuts(data: Data) -> str:
    return (
        "*As shared*: each file holds, in order, what the rank takes of the whole where samples are not shuffled. "
        f"*Quarters*: runs of the file. *Uneven*: the last worker has a {SMALL_PART}th of the samples, and the others "
        "share the rest. *By class*: quarters in the order of the classes, highest first, so that each worker lacks "
        f"most of them. All cuts together are the same {len(data.train):,} samples. (The highest class is with the "
        "lead because a test file may have no class above those of the training file beside it.)"
    )


def _learning(lab: Lab) -> str:
    counts = ", ".join(f"{len(seeds(lab, mode))} in {mode}" for mode in MODES)
    return (
        f"Means over seeds ({counts}), with half of the 95 % interval where there are several; differences are taken "
        "seed by seed. In `bsp` an update is the mean gradient of a batch of every worker, so of all classes in each "
        "of the cuts; a worker with few samples is heard until it has none left. In `local_sgd` each worker takes "
        "eight steps alone, towards what its own samples want, before weights are averaged. In `asp` each worker's "
        "gradient is an update of its own, of its own classes alone, and nothing makes workers take turns: the last "
        "updates of a training may be those of one worker. In `asp` an epoch has four times as many updates as in "
        "`bsp`, so that modes are not to be compared here, but cuts are."
    )


def _running_out(data: Data, steps: list[list[int]]) -> str:
    each, small = steps_of_epoch(data, "uneven"), len(data.parts["uneven"][-1])
    empty = sum(step[RANKS - 1] == 0 for step in steps) // EPOCHS
    even = steps_of_epoch(data, "quarters")
    return (
        f"The last worker has {small:,} samples, for {-(-small // BATCH)} steps; the others have more. All make as "
        f"many steps an epoch as the one with the most samples needs, {each} ({even} with equal quarters), and the "
        f"last worker's pushes are empty in {empty} of them. The mean of an update is weighted by samples, so an "
        "empty push changes nothing; the last updates of an epoch are of fewer samples, and a worker that has none "
        "left waits."
    )


def _refused(lab: Lab, data: Data) -> list[str]:
    cases = [
        (
            "normalize",
            "One worker scales its samples, and the others do not",
            "to be normalised",
            lambda rank: ["--data=own", *(["--normalize=standard"] if rank == RANKS - 1 else [])],
        ),
        (
            "shared",
            "Workers have different files, and nobody says `--data=own`",
            "the worker's experiment differs from the job's: --dataset=",
            lambda rank: [],
        ),
    ]
    said = ["A job does not begin with samples that do not go together. Each of these was tried:"]
    for name, what, expected, more in cases:
        message = refusal(lab, data, name, more, expected)
        said.append(f"- {what}: " + (f"`{message}`" if message else "this was NOT refused."))
    return [said[0], "\n".join(said[1:])]
