"""deploy/compare.sh: see --help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from commands import check_programs
from comparison import Comparison
from compose import verdicts
from flags import UsageError
from folder import OutputFolder, Refused
from job import Interrupted
from process import Stop
from progress import runs, say
from settings import Settings, fail_usage, parse
from step_time import ProbeFailed

_EXIT_FAILED = 1
_EXIT_SIGNAL = 128  # Plus its number, as shells have it.


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    try:
        if arguments[:1] == ["report"]:
            return report(arguments[1:])
        if arguments[:1] == ["verdicts"]:
            return verdicts(arguments[1:])
        # deploy/compare.sh asks before it builds.
        only_check = arguments[:1] == ["--check"]
        settings = parse(arguments[1:] if only_check else arguments)
        return 0 if only_check else compare(settings, arguments)
    except UsageError as error:
        return fail_usage(error)
    except (Refused, ProbeFailed, OSError) as error:  # OSError: no space is left, say.
        say(str(error))
        return _EXIT_FAILED
    except KeyboardInterrupt:
        say("stopped; what is done is kept, and the same command goes on")
        return _EXIT_SIGNAL + signal.SIGINT


def compare(settings: Settings, arguments: Sequence[str]) -> int:
    """UsageError; Refused; ProbeFailed."""
    check_programs(settings)
    stop = Stop()
    stop.watch()
    output = OutputFolder(settings.output)
    try:
        comparison = Comparison(settings, arguments, output, stop)
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
            say(f"{runs(comparison.failures)} failed or timed out: the report has the reasons")
        if stop.requested:
            say(f"stopped with {runs(comparison.left)} to make; the same command goes on")
        return status
    finally:
        output.close()


def report(arguments: Sequence[str]) -> int:
    """The report alone. UsageError; Refused."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "plan.json").is_file():
        raise UsageError("report: expected the folder of a comparison, with its plan.json")
    try:
        show_report(Path(arguments[0]))
    except ValueError as error:  # No run has ended.
        raise Refused(str(error)) from None
    return 0


def show_report(output: Path) -> None:
    """Writes it, and prints what it comes to."""
    from report import write_reports
    from terminal import summary

    print(summary(write_reports(output).sections), flush=True)
    say(f"the report: {output / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
