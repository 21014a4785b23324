"""What a report contains, in order: headings, sentences, tables and figures. The page and report.md are made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import agreement
import statements
import tables
from figures import CONDITION_TITLES, Figure
from modes_explained import explained
from records import CPU_BOUND_SHARE
from summary import PYTORCH, Comparison, did_not_end
from tables import Table
from verdicts import Verdict


@dataclass
class Section:
    """A heading with what is under it. Sentences come first, then tables, then figures."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    bullets: list[str] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)  # With a caption each.
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # After everything else.


_FIRST = ("Who waits for whom", "Throughput", "Accuracy over time")  # Before the tables.
FEW_SEEDS = 5  # Below it Student's t is 3 and more.
HOW_TO_READ = (
    "Only what the 95 % intervals of these runs allow is said, for this model, these data and this machine. "
    "Samples/s say how fast a mode trains; points are of test accuracy, in percent, more or less than bsp's. "
    "Where an interval (±) has 0 in it, the runs show no difference."
)
DEFINITIONS = [
    "Time is the first server's clock; 0 s is its first applied version.",
    "Samples count when a version contains them. Those that were computed, but came too late or were too stale, are "
    "the column of dropped samples.",
    "Accuracy and loss are of the test split, with the weights at the servers: in local_sgd and easgd the centre, "
    "not a worker's own. They are computed from copies, while the workers go on.",
    "samples/s are the samples applied after the first version over the time from the first version to the last.",
    "Waiting is the workers' time in which a server made them wait, over all their time in batches but each one's "
    "first.",
    "The predicted samples/s follow from the step times of bsp under the same condition with the same seed: bsp "
    "waits for the slowest of N workers, asp and easgd add up the workers' rates, local_sgd waits for the slowest sum "
    "of K batches; ssp and backup are simulated, the latter with late workers that finish their batch before they "
    "begin with the next step. bsp's workers exchange all at once, which takes them longer than those that do not: "
    "the others may be faster than predicted by that.",
    "Staleness is the number of versions by which a push's weights were behind when the first server applied it; the "
    "clock gap of a step is by how many steps its worker was ahead of the slowest.",
    "A run's result is its last evaluation. sd is the standard deviation over seeds. Differences and ratios are "
    "paired by seed, with a 95 % interval of Student's t (ratios by their logarithm). The intervals are not "
    "adjusted for their number: of twenty statements one may be wrong.",
    "Means are over the runs that ended as they should, and the column of runs says how many did.",
    f"Where processes used more than {100 * CPU_BOUND_SHARE:.0f} % of the processors, times are marked "
    f'"{tables.CPU_BOUND}".',
]


def sections_of(
    comparison: Comparison, plan: dict[str, Any], figures: list[Figure], verdicts: list[Verdict]
) -> list[Section]:
    """The whole report."""
    pictures = _figures(figures)
    found = [_front(comparison), _modes(comparison)]
    if verdicts:
        found.append(Section("Verdicts", bullets=[str(verdict) for verdict in verdicts]))
    found += [section for section in pictures if section.title in _FIRST]
    found += [_condition(comparison, condition) for condition in comparison.conditions]
    found += [section for section in pictures if section.title not in _FIRST]
    found += _single_worker(comparison, plan, figures)
    found.append(_rates(comparison, plan))
    found.append(Section("How this was measured", _provenance_paragraphs(plan, comparison), DEFINITIONS))
    return found


def provenance(plan: dict[str, Any], comparison: Comparison) -> str:
    """A line for every figure: command, seeds, machine and commit."""
    machine = plan.get("machine", {})
    parts = [f"Command: {plan.get('command', 'not recorded')}", f"seeds {_seeds(comparison)}"]
    names = [machine.get("cpu") or "machine not recorded"]
    if machine.get("cores"):
        names.append(f"{machine['cores']} cores")
    parts.append(", ".join(names))
    commit = str(plan.get("commit") or "not recorded")[:12]
    return "; ".join([*parts, f"commit {commit}{' with changes' if plan.get('dirty') else ''}"]) + "."


def _seeds(comparison: Comparison) -> str:
    return ", ".join(map(str, comparison.seeds)) or "none"


def _front(comparison: Comparison) -> Section:
    section = Section("What to choose when")
    lost = [run for run in comparison.reported if not run.done]
    section.bullets = statements.choices(comparison)
    if not section.bullets:
        section.paragraphs.append("No modes were compared.")
    else:
        section.paragraphs.append(HOW_TO_READ)
    if len(comparison.seeds) == 1:
        section.notes.append("There is one seed: no interval, and so no statement about differences.")
    elif len(comparison.seeds) < FEW_SEEDS:
        section.notes.append(
            f"With {len(comparison.seeds)} seeds the intervals are wide, and few statements can be made: more --seeds "
            "narrow them."
        )
    if any(run.learning_rate is not None and not run.tuned for group in comparison.groups for run in group.runs):
        section.notes.append("The learning rates are not tuned: a mode may do better with another one.")
    if lost:
        each = "it" if len(lost) == 1 else "them"
        section.tables.append((f"{did_not_end(len(lost))}; no mean contains {each}", tables.lost(comparison)))
    return section


def _modes(comparison: Comparison) -> Section:
    return Section("The modes", bullets=[text for mode in comparison.modes if (text := explained(mode))])


def _tuned(comparison: Comparison) -> bool:
    runs = [run for group in comparison.groups for run in group.runs]
    return bool(runs) and all(run.tuned for run in runs)


def _condition(comparison: Comparison, condition: str) -> Section:
    groups = comparison.under(condition)
    title = CONDITION_TITLES.get(condition, condition)
    return Section(
        title[0].upper() + title[1:],
        bullets=[sentence for group in groups if (sentence := statements.about(group))],
        tables=[
            (tables.OUTCOME, tables.outcome(groups)),
            ("Time and samples to an accuracy, means over the runs that reached it", tables.targets(groups)),
            ("Inside", tables.inside(groups)),
        ],
    )


def _figures(figures: list[Figure]) -> list[Section]:
    found: dict[str, Section] = {}
    for figure in figures:
        if figure.section not in ("Price of staleness", "References"):
            found.setdefault(figure.section, Section(figure.section)).figures.append(figure)
    return list(found.values())


def _single_worker(comparison: Comparison, plan: dict[str, Any], figures: list[Figure]) -> list[Section]:
    found = []
    for title, groups, table, sentences in (
        ("What staleness costs", comparison.staleness, tables.staleness, statements.about_staleness),
        ("Reference curves", comparison.references, tables.references, agreement.sentences),
    ):
        if groups:
            name = "Price of staleness" if groups is comparison.staleness else "References"
            own = [figure for figure in figures if figure.section == name]
            found.append(Section(title, bullets=sentences(comparison), tables=[("", table(comparison))], figures=own))
            if groups is comparison.references:
                found[-1].paragraphs.append(agreement.WHY)
                found[-1].notes += _pytorch_note(comparison, plan)
    return found


def _pytorch_note(comparison: Comparison, plan: dict[str, Any]) -> list[str]:
    """Why PyTorch's curve is not there."""
    if comparison.reference(PYTORCH) is not None:
        return []
    if PYTORCH in " ".join(plan.get("runs", [])):
        return ["PyTorch's curve is still to be made."]
    return [f"PyTorch's curve is left out: {plan.get('no_pytorch') or 'it was not planned'}."]


def _rates(comparison: Comparison, plan: dict[str, Any]) -> Section:
    section = Section("Learning rates", tables=[("", tables.rates(comparison))])
    if all(run.learning_rate is None for group in comparison.groups for run in group.runs):
        section.paragraphs.append("The script's own, under every mode.")
        return section
    tuning = plan.get("tuning") or {}
    section.paragraphs.append(
        "Each mode, and each enforced staleness, got equally many trials, with a seed that is not reported here."
        if _tuned(comparison)
        else "Not tuned."
    )
    edge = [name for name, entry in tuning.items() if entry.get("at_edge")]
    if edge:
        section.notes.append(
            f"The best rate of {', '.join(edge)} is at the edge of those tried with its momentum: beyond it may be a "
            "better one."
        )
    return section


def _provenance_paragraphs(plan: dict[str, Any], comparison: Comparison) -> list[str]:
    machine = plan.get("machine", {})
    about = "; ".join(f"{name}: {value}" for name, value in machine.items())
    paragraphs = [provenance(plan, comparison), f"Machine: {about or 'not recorded'}."]
    if plan.get("step_time_s"):
        paragraphs.append(
            f"Every batch was made to last at least {1000 * plan['step_time_s']:g} ms by idling, so that the modes are "
            "compared and not the scheduler; delays are idle time as well."
        )
    return paragraphs
