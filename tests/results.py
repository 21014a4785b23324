#!/usr/bin/env python3
"""Reads the JUnit files that CTest or pytest wrote: of a first run, then of the tests that were run again.

usage: results.py summary REPORT...
           prints failed tests with their output, skipped tests with their reason, unsteady tests (those that passed
           when they were run again), and as the last line "PASSED FAILED SKIPPED UNSTEADY", four numbers
       results.py again REPORT [NUMBERS]
           prints, each on a line, the failed tests that may be run again: the tests' numbers in CTest's file NUMBERS
           (Testing/Temporary/LastTestsFailed.log), or pytest's ids

What a sanitizer reports, a crash, and a wrong hash or count are never luck: such a test is not run again.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree

LINES_MAX = 120  # So much of a failed test's output is printed; the end says most.

NEVER_LUCK = re.compile(
    r"ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|SUMMARY: \w+Sanitizer|: runtime error: "
    r"|SegFault|SIGSEGV|SIGABRT|SIGFPE|SIGILL|SIGBUS|Segmentation fault|core dumped|terminate called|Subprocess aborted"
    # This is how an assertion that failed is printed: Catch2's CHECK( a == b ), CHECK_FALSE( a ) and Python's assert.
    r"|^\s*(?:(?:CHECK|REQUIRE)\w*\(|(?:E\s+)?assert\b|(?:E\s+)?AssertionError\b).*"
    r"(?i:hash|twice|counted|contributions|samples|\bpushes\b|\.runs\b|weights ==|== weights|other weights)",
    re.MULTILINE,
)


class Case:
    """One test in one run. outcome: "passed", "failed" or "skipped"."""

    def __init__(self, element):
        self.element = element
        self.seconds = float(element.get("time") or 0)
        status = element.get("status")
        skipped = element.find("skipped")
        message = skipped.get("message", "") if skipped is not None else ""
        if status is None:  # pytest's
            self.name = f"{element.get('classname').rpartition('.')[2]}: {element.get('name')}"
            broken = next((b for b in map(element.find, ("failure", "error")) if b is not None), None)
            self.why = broken.get("message", "") if broken is not None else message
            self.output = "\n".join(
                element.findtext(part) or "" for part in ("failure", "error", "system-out", "system-err")
            )
            self.outcome = "failed" if broken is not None else "skipped" if skipped is not None else "passed"
            return
        self.name = element.get("name")
        self.output = element.findtext("system-out") or ""
        failure = element.find("failure")
        self.why = failure.get("message", "") if failure is not None else message or status
        # Catch2 2 ends with 0 when a name matches none of its tests: nothing ran, so nothing passed.
        if status == "run" and "No test cases matched" not in self.output:
            self.outcome = "passed"
        elif status == "disabled" or (status == "notrun" and message.startswith("SKIP_")):
            self.outcome = "skipped"
        else:  # "fail", and "notrun" for want of a program.
            self.outcome = "failed"

    def may_run_again(self):
        return self.outcome == "failed" and not NEVER_LUCK.search(f"{self.why}\n{self.output}")

    def pytest_id(self):
        """FILE::CLASS::NAME; the report has the file's folders and the class in one word with dots."""
        parts = self.element.get("classname").split(".")
        for count in range(len(parts), 0, -1):
            path = pathlib.Path(*parts[:count]).with_suffix(".py")
            if path.exists():
                return "::".join([str(path), *parts[count:], self.element.get("name")])
        return None

    def print_failure(self):
        print(f"FAILED: {self.name} ({self.seconds:.1f} s) {self.why.splitlines()[0] if self.why else ''}".rstrip())
        lines = self.output.rstrip().splitlines()
        if len(lines) > LINES_MAX:
            print(f"    ... {len(lines) - LINES_MAX} lines left out")
        for line in lines[-LINES_MAX:]:
            print(f"    {line}")

    def print_skipped(self):
        said = re.search(r"^.*SKIPPED:\s*(.+)$", self.output, re.MULTILINE)
        print(f"skipped: {self.name}: {said.group(1).strip() if said else self.why or 'no reason given'}")


def read(report):
    """The report's tests by their names, in its order."""
    found = {}
    for element in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        case = Case(element)
        found[(element.get("classname"), case.name)] = case
    return found


def summary(reports):
    first, *later = map(read, reports)
    counts = dict.fromkeys(("passed", "failed", "skipped", "unsteady"), 0)
    for key, case in first.items():
        runs = [case, *(run[key] for run in later if key in run)]
        last = runs[-1]
        counts[last.outcome] += 1
        if last.outcome == "failed":
            runs[0].print_failure()
            if len(runs) > 1:
                print(f"    (failed {len(runs)} of {len(runs)} runs; this is the first one's output)")
        elif last.outcome == "skipped":
            last.print_skipped()
        elif len(runs) > 1:
            counts["unsteady"] += 1
            print(f"unsteady: {case.name} (failed {len(runs) - 1} of {len(runs)})")
    print(*counts.values())


def again(report, numbers=None):
    wanted = {case.name: case for case in read(report).values() if case.may_run_again()}
    if numbers is None:
        ids = [case.pytest_id() for case in wanted.values()]
    else:
        failed = (line.split(":", 1) for line in pathlib.Path(numbers).read_text().splitlines())
        ids = [number for number, name in failed if name in wanted]
    for one in filter(None, ids):
        print(one)


def main():
    if len(sys.argv) >= 3 and sys.argv[1] == "summary":
        summary(sys.argv[2:])
    elif len(sys.argv) in (3, 4) and sys.argv[1] == "again":
        again(*sys.argv[2:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
