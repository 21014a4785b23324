"""Four workers learn a function, and average gradients after every batch, or more rarely, or never."""

from __future__ import annotations

from .function_claims import claims, time_ratio
from .function_notes import counting
from .function_results import Results, measure
from .function_runs import FULL, NEVER, QUICK, WORKERS, Plan
from .function_sections import sections
from .lab import Lab
from .network import MODEL
from .page import Page


def run(lab: Lab) -> Page:
    """All of it."""
    plan = lab.pick(FULL, QUICK)
    results = measure(lab, plan)
    title = "Averaging gradients rarely: a function learnt by four workers"
    return Page(title, _finding(results), _lead(plan), claims(results), sections=sections(results))


def _lead(plan: Plan) -> str:
    text, code = plan.text, plan.code
    return (
        f"{WORKERS} workers with a quarter of {plan.samples:,} points each learn y = √x·sin(3.14·x/5), x uniform in 0 "
        f"to 20 (`--dataset=function:sqrt_sin`), with the network `{MODEL}`, relu, the mean squared error and batches "
        f"of {plan.batch:,} (`--shuffle=false --normalize=none`). Every K-th gradient is averaged over the workers and "
        "applied by all alike; in between each takes SGD steps of its own; and from time to time their weights are "
        "averaged: `--mode=local_sgd --local_sync=gradients --local_steps=K --average_every=…`, K = 1, 2, 4, 10 and 0, "
        f"which is never. The source's text and code differ: *text* is a learning rate of {text.learning_rate:g} with "
        f"weights averaged {counting(text)}, *code* is {code.learning_rate:g} and {counting(code)}. What is called "
        "*mixed* here has the code's learning rate and the text's counting."
    )


def _finding(results: Results) -> str:
    never, reached = time_ratio(results, NEVER), results.best(1).epochs_until(results.plan.goal)
    parts = []
    if never is not None:
        parts.append(
            f"never averaging gradients takes {never.mean:.2f} of the time that averaging after every batch takes"
        )
    if reached is not None:
        parts.append(f"with every gradient averaged the loss is under {results.plan.goal:g} after {reached:,g} epochs")
    text = "; ".join(parts) or "it diverged"
    return f"{text[0].upper()}{text[1:]}."
