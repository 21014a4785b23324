"""The shell scripts, and names of tests: what is wrong in them only now and then, or that only a run of all finds."""

import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Readers that end before their input does. What still writes to one is ended by SIGPIPE, and under pipefail the whole
# pipeline has failed with status 141, or not, as the two happened to run.
ENDS_EARLY = re.compile(r"\|\s*(head\b|grep\b[^|]*\s-[a-zA-Z]*[qm]|sed\b[^|]*[0-9;{ ]q\b|awk\b[^|]*\bexit\b)")


def scripts():
    """The shell scripts under the folders that hold some, those that a build makes left out."""
    found = [path for folder in ("cmake", "deploy", "tests") for path in sorted((ROOT / folder).rglob("*.sh"))]
    return [path for path in found if path.is_file()]


def early_ends(text):
    """The lines of a script in which a reader may end before what it reads from, under pipefail."""
    if "pipefail" not in text:
        return []
    return [line for line in text.splitlines() if not line.lstrip().startswith("#") and ENDS_EARLY.search(line)]


class ScriptsTest(unittest.TestCase):
    def test_no_pipeline_under_pipefail_ends_in_a_reader_that_ends_early(self):
        found = [f"{path.relative_to(ROOT)}: {line}" for path in scripts() for line in early_ends(path.read_text())]
        assert found == [], "\n".join(found)

    def test_readers_that_end_early_are_found(self):
        for reader in ("head -n 1", "grep -q x", "grep -Eqm1 x", "sed -n '1{p;q}'", "sed 3q", "awk '{print; exit}'"):
            line = f"first=$(all | {reader})"
            assert early_ends(f"set -o pipefail\n{line}") == [line], reader
            assert early_ends(line) == [], reader
        for reader in ("sed -n 1p", "tail -n 1", "grep -c x", "grep quick", "sort -u"):
            assert early_ends(f"set -o pipefail\nall | {reader}") == [], reader

    def test_every_script_can_be_read_by_the_shell(self):
        for path in scripts():
            shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
            read = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=60)
            assert (read.returncode, read.stderr) == (0, ""), path

    def test_no_name_of_a_test_case_has_a_semicolon(self):
        # CMake takes it for the end of the name: the test is not run, and two that there are not are.
        name = re.compile(r'(?:TEST_CASE|SCENARIO)\(\s*"([^"]*;[^"]*)"')
        assert name.findall('TEST_CASE(\n    "one; two")') == ["one; two"]
        found = [text for path in sorted((ROOT / "tests").rglob("*.cc")) for text in name.findall(path.read_text())]
        assert found == [], found


if __name__ == "__main__":
    unittest.main()
