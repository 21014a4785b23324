"""What deploy/compare.sh does with its flags, and the status that it exits with."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from experiments.compare.commands import check_programs
from experiments.compare.comparison import Comparison, print_anywhere, runs, say
from experiments.compare.folder import REPORTED, OutputFolder, Refused, read_plan, space_on
from experiments.compare.run import ProbeFailed
from experiments.compare.settings import Settings, UsageError, make_parser, parse
from experiments.shared.job import Interrupted
from experiments.shared.machine import why_no_reports
from experiments.shared.processes import Stop

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_SIGNAL = 128  # Plus its number, as shells have it.


def main(arguments: Sequence[str]) -> int:
    print_anywhere()
    try:
        if arguments[:1] == ["report"]:
            return report(arguments[1:])
        if arguments[:1] == ["verdicts"]:
            _check_packages()
            from experiments.compare.report import verdicts

            return verdicts(arguments[1:])
        if arguments == ["--packages"]:  # For who asks for verdicts only after much else.
            _check_packages()
            return 0
        # The script that builds asks before it does.
        only_check = arguments[:1] == ["--check"]
        settings = parse(arguments[1:] if only_check else arguments)
        return 0 if only_check else compare(settings, arguments)
    except UsageError as error:
        say(f"{error} (--help lists the flags)")
        return _EXIT_USAGE
    except (Refused, ProbeFailed, OSError) as error:
        say(str(error))
        return _EXIT_FAILED
    except KeyboardInterrupt:
        say("stopped; what is done is kept, and the same command goes on")
        return _EXIT_SIGNAL + signal.SIGINT


def compare(settings: Settings, arguments: Sequence[str]) -> int:
    """UsageError; Refused; ProbeFailed."""
    check_programs(settings)
    _check_packages()
    stop = Stop()
    with space_on(settings.output), OutputFolder(settings.output) as output:
        comparison = Comparison(settings, arguments, output, stop)
        stop.watch()
        status = _EXIT_FAILED
        try:
            comparison.run()
            status = _EXIT_FAILED if comparison.failures else 0
        except Interrupted:
            status = _EXIT_SIGNAL + stop.signals[0]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # From here on, one is enough.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if comparison.ended:
            show_report(settings.output)
        if comparison.failures:
            them = "it" if comparison.failures == 1 else "them"
            say(f"{runs(comparison.failures)} failed or timed out: the report has the reasons")
            say(f"the same command makes {them} again, and nothing else")
        if stop.requested:
            left = "before the first run" if comparison.left is None else f"with {runs(comparison.left)} to make"
            say(f"stopped {left}; the same command goes on")
        return status


def report(arguments: Sequence[str]) -> int:
    """The report alone. UsageError; Refused. Exits for --help."""
    if {"--help", "-h"}.intersection(arguments):
        make_parser().parse_args(["--help"])
    output = Path(*arguments[:1])
    if len(arguments) != 1 or read_plan(output, needed=REPORTED) is None:
        raise UsageError("report: expected the folder of a comparison, with its plan.json")
    _check_packages()
    try:
        with space_on(output):
            show_report(output)
    except ValueError as error:  # No run has ended.
        raise Refused(str(error)) from None
    return 0


def _check_packages() -> None:
    """Refused, with what to install: a report that cannot be written is better known before the runs than after."""
    if why := why_no_reports():
        raise Refused(why)


def show_report(output: Path) -> None:
    """Writes it, and prints what it comes to."""
    from experiments.compare.report import summary, write_reports

    print(summary(write_reports(output).sections), flush=True)
    say(f"the report: {output / 'report.html'}")
