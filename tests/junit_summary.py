#!/usr/bin/env python3
"""Reads a JUnit file of CTest or pytest: prints failed tests with their output and skipped tests with their reason.

usage: junit_summary.py FILE

The last line of stdout is "PASSED FAILED SKIPPED", three numbers, for tests/run.sh.
"""
import re
import sys
import xml.etree.ElementTree

LINES_MAX = 120  # Of one failed test's output; the end says most.


def skip_reason(case, output):
    """The reason that the test printed, or CTest's if it never ran."""
    said = re.search(r"^.*SKIPPED:\s*(.+)$", output, re.MULTILINE)
    if said:
        return said.group(1).strip()
    skipped = case.find("skipped")
    return skipped.get("message", "no reason given") if skipped is not None else "no reason given"


def name_of(case):
    """CTest's, or pytest's with its file."""
    if case.get("status") is not None:
        return case.get("name")
    return f"{case.get('classname').rpartition('.')[2]}: {case.get('name')}"


def pytest_outcome(case):
    """What CTest calls the outcome, and what pytest says of it."""
    for kind in ("failure", "error"):
        if case.find(kind) is not None:
            return "fail", "\n".join(case.findtext(part) or "" for part in (kind, "system-out", "system-err"))
    return ("disabled" if case.find("skipped") is not None else "run"), ""


def print_failure(case, output):
    seconds = float(case.get("time") or 0)
    failure = case.find("failure")
    why = (failure.get("message", "") if failure is not None else case.get("status") or "").splitlines()
    print(f"FAILED: {name_of(case)} ({seconds:.1f} s) {why[0] if why else ''}".rstrip())
    lines = output.rstrip().splitlines()
    if len(lines) > LINES_MAX:
        print(f"    ... {len(lines) - LINES_MAX} lines left out")
    for line in lines[-LINES_MAX:]:
        print(f"    {line}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    passed = failed = skipped = 0
    for case in xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
        output = case.findtext("system-out") or ""
        status = case.get("status")
        if status is None:
            status, output = pytest_outcome(case)
        # Catch2 2 ends with 0 when a name matches none of its tests: nothing ran, so nothing passed.
        matched_none = "No test cases matched" in output
        message = case.find("skipped").get("message", "") if case.find("skipped") is not None else ""
        if status == "run" and not matched_none:
            passed += 1
        elif status == "disabled" or (status == "notrun" and message.startswith("SKIP_")):
            skipped += 1
            print(f"skipped: {name_of(case)}: {skip_reason(case, output)}")
        else:  # "fail", and "notrun" for want of a program.
            failed += 1
            print_failure(case, output or message)
    print(passed, failed, skipped)


if __name__ == "__main__":
    main()
