"""Digits: the 400-25-10 sigmoid network on 5,000 MNIST digits, full batch, beside NumPy and beside a link's rate."""

from __future__ import annotations

from . import digits_claims, digits_sections
from .digits_results import Results
from .digits_runs import (
    LINK_MBIT_PER_S,
    TIMED_WORKERS,
    fill_link,
    find_digits,
    follow_reference,
    reference_steps,
    time_hosts,
    time_one_host,
    timed_steps,
)
from .hosts import Hosts
from .lab import Lab, Skipped
from .page import Page

_LEAD = """A network of 400 inputs, 25 sigmoid units and 10 sigmoid outputs learns 5,000 handwritten digits: the first
500 of each class of MNIST's training split, of each the central 20 by 20 pixels. The loss is the sigmoid cross-entropy
summed over the outputs; every iteration uses all samples. In one part it makes {steps} iterations at a learning rate of
2, beside the same training in NumPy, from the same initial weights. In the other it makes {timed} iterations at 0.1, of
which each one's time is measured, with 1, 2 and 4 workers that share the samples: on one host, and on hosts with a link
of 1 Gbit/s each. (Here these hosts are network namespaces of one machine, and share its {cores} cores.)"""


def run(lab: Lab) -> Page:
    """Skipped where neither MNIST nor Fashion-MNIST is."""
    digits = find_digits(lab)
    results = Results(digits)
    if digits.is_mnist:
        results.curves = follow_reference(lab, digits)
    results.timings = time_one_host(lab, digits)
    try:
        with Hosts(max(TIMED_WORKERS), LINK_MBIT_PER_S) as hosts:
            results.timings += time_hosts(lab, digits, hosts)
            results.filled = fill_link(lab, hosts)
    except Skipped as skipped:
        results.no_link = str(skipped)
        lab.say(f"without links: {skipped}")
    return Page(
        "Digits: 1,000 iterations beside NumPy, and where an iteration's time goes",
        digits_claims.finding(results),
        _LEAD.format(steps=f"{reference_steps(lab):,}", timed=timed_steps(lab) - 1, cores=results.cores)
        + digits_claims.substitute(results),
        digits_claims.claims(results),
        digits_claims.beside_numpy(results),
        "by NumPy, on the same digits",
        sections=digits_sections.sections(results),
    )
