"""tests/results.py: what is counted of tests that ran once and again, and what may run again."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

RESULTS = pathlib.Path(__file__).with_name("results.py")


def ctest_case(name, status="run", output="", message=""):
    failure = f'<failure message="{message}"/>' if status == "fail" else ""
    skipped = f'<skipped message="{message}"/>' if status == "notrun" else ""
    return (
        f'<testcase name="{name}" classname="{name}" time="0.5" status="{status}">{failure}{skipped}'
        f"<system-out>{output}</system-out></testcase>"
    )


class ResultsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def report(self, name, *cases):
        path = self.folder / name
        path.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
        return str(path)

    def run_results(self, *arguments, cwd=None):
        command = [sys.executable, "-B", str(RESULTS), *arguments]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=cwd)
        return ran.stdout.splitlines()

    def again(self, *cases):
        numbers = self.folder / "LastTestsFailed.log"
        numbers.write_text("7:a\n9:b: with, words\n")
        return self.run_results("again", self.report("first", *cases), str(numbers))

    def test_a_test_that_passes_when_it_runs_again_counts_as_passed_and_is_named(self):
        first = self.report("1", ctest_case("a", "fail", "at first", "Failed"), ctest_case("b"))
        second = self.report("2", ctest_case("a", "fail", "", "Failed"))
        third = self.report("3", ctest_case("a"))
        lines = self.run_results("summary", first, second, third)
        assert lines == ["unsteady: a (failed 2 of 3)", "2 0 0 1"]

    def test_a_test_that_never_passes_is_failed_with_the_output_of_its_first_run(self):
        first = self.report("1", ctest_case("a", "fail", "at first", "Failed"))
        second = self.report("2", ctest_case("a", "fail", "later", "Failed"))
        lines = self.run_results("summary", first, second)
        assert "    at first" in lines
        assert lines[-1] == "0 1 0 0"

    def test_a_failed_test_runs_again_by_its_number(self):
        cases = (ctest_case("a"), ctest_case("b: with, words", "fail", "timed out", "Timeout"))
        assert self.again(*cases) == ["9"]

    def test_reports_of_sanitizers_crashes_and_wrong_hashes_or_counts_do_not_run_again(self):
        for output in (
            "==1==ERROR: AddressSanitizer: heap-use-after-free",
            "WARNING: ThreadSanitizer: data race (pid=1)",
            "x.cc:3:5: runtime error: signed integer overflow",
            "due to a fatal error condition:\n  SIGSEGV - Segmentation violation signal",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            "  CHECK( hash == expected_hash )",
            "AssertionError: 3 pushes were counted, 2 were sent",
            "  REQUIRE( contributions == 4 )",
            "  CHECK( own.Hash() == shared.Hash() )",
            "  CHECK( HashOf(weights) == expected )",
            "  CHECK_FALSE( counted )",
            "  CHECK( division.runs == 400 )",
            "AssertionError: 2 servers, [1] killed after 0.218 s: other weights",
        ):
            with self.subTest(output):
                assert self.again(ctest_case("a", "fail", output, "Failed")) == []
        assert self.again(ctest_case("a", "fail", "", "Exception: SegFault")) == []

    def test_a_word_of_a_log_is_no_wrong_hash(self):
        for output in ("I ps_worker: weights hash 12", "  CHECK( joined )", "AssertionError: waited 40 s for the job"):
            with self.subTest(output):
                assert self.again(ctest_case("a", "fail", output, "Failed")) == ["7"]

    def test_a_name_that_matched_no_test_is_a_failure(self):
        lines = self.run_results("summary", self.report("1", ctest_case("a", "run", "No test cases matched 'a'")))
        assert lines[-1] == "0 1 0 0"

    def test_skipped_tests_are_shown_with_their_reason(self):
        case = ctest_case("a", "notrun", "SKIPPED: no engine", "SKIP_REGULAR_EXPRESSION_MATCHED")
        assert self.run_results("summary", self.report("1", case)) == ["skipped: a: no engine", "0 0 1 0"]

    def test_a_failed_test_of_pytest_runs_again_by_its_id(self):
        (self.folder / "tests/python").mkdir(parents=True)
        (self.folder / "tests/python/test_x.py").touch()
        case = '<testcase classname="tests.python.test_x.TestY" name="test_z[1-a]"><failure message="no"/></testcase>'
        ids = self.run_results("again", self.report("1", case), cwd=self.folder)
        assert ids == ["tests/python/test_x.py::TestY::test_z[1-a]"]


if __name__ == "__main__":
    unittest.main()
