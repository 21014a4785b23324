"""Work that is shared by processes: results in order, exceptions, a process that dies."""

from __future__ import annotations

import os
import signal
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.shared.processes import in_parallel


class ParallelTest(unittest.TestCase):
    def test_results_are_in_order(self) -> None:
        for count in (0, 1, 2, 7):
            assert in_parallel(lambda item: item * item, range(count)) == [item * item for item in range(count)]

    def test_an_exception_comes_back(self) -> None:
        with self.assertRaises(ZeroDivisionError):  # noqa: PT027
            in_parallel(lambda item: 1 / item, [2, 1, 0, 3])

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "one core: the work is not shared")
    def test_a_process_that_dies_is_no_hang(self) -> None:
        with self.assertRaisesRegex(OSError, "a process of the report was killed"):  # noqa: PT027
            in_parallel(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1, 2])


if __name__ == "__main__":
    unittest.main()
