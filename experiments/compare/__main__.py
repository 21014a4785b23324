"""deploy/compare.sh: see --help. In words that old Pythons can read, so that they can say that they are too old."""

import os
import signal
import sys

_STOPPED = b"compare: stopped before anything was begun\n"


def _end_in_one_line(number, _):  # type: ignore[no-untyped-def]
    os.write(2, _STOPPED)
    os._exit(128 + number)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.stderr.write("compare: needs Python 3.10 or newer, this is {}.{}\n".format(*sys.version_info))
        sys.exit(1)
    # An exception in the middle of imports would be told with all of them.
    at_first = signal.getsignal(signal.SIGINT)
    if at_first is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_in_one_line)
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from experiments.compare.main import main

    signal.signal(signal.SIGINT, at_first)
    sys.exit(main(sys.argv[1:]))
