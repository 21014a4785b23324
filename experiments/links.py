"""Links: the same training over slow and fast links, with parameter servers and with MPI."""

from __future__ import annotations

from . import links_claims, links_sections
from .lab import Lab
from .links_results import Results
from .links_runs import FREE, measure, plain_stream
from .links_systems import BATCH, network
from .mpi_hosts import why_no_mpi
from .page import Page

_LEAD = """Four workers train a network `{model}` on Fashion-MNIST (the central {crop} by {crop} pixels, batches of
{batch} a worker, momentum SGD), each on a host of its own, and every host is connected to a switch by a link of
{rates} Mbit/s in each direction. Gradients are summed by one server, by four on hosts of their own, by four on the
workers' hosts, or, in MPI, by the workers among themselves. The model has {kilobytes:,.0f} KB, which take
{slow_ms:,.0f} ms over a link of {slowest} Mbit/s. The hosts are network namespaces on one machine with {cores} cores,
which all processes share: over fast links it may be these that set the pace{free}."""


def run(lab: Lab) -> Page:
    """Skipped where there are no network namespaces."""
    results = Results(network(lab), measure(lab), plain_stream(lab), why_no_mpi(lab))
    rates = [f"{rate:,}" for rate in results.rates]
    return Page(
        "Links: the same training over 10, 100 and 1,000 Mbit/s, beside MPI",
        links_claims.finding(results),
        _LEAD.format(
            model=results.of.model,
            crop=results.of.crop,
            batch=BATCH,
            rates=" or ".join(rates),
            kilobytes=results.of.model_bytes / 1e3,
            slow_ms=results.of.model_bytes * 8 / results.slowest / 1e3,
            slowest=results.slowest,
            cores=results.cores,
            free=", which the column without a limit shows" if FREE in results.outcomes else "",
        ),
        expected=links_claims.claims(results),
        expected_column="by the formula named",
        sections=links_sections.sections(results),
    )
