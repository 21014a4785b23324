"""tests/analysis.py: a source is read again when it, or what it includes, changes, and else not."""

import importlib.util
import pathlib
import tempfile
import unittest
from unittest import mock

SPEC = importlib.util.spec_from_file_location("analysis", pathlib.Path(__file__).with_name("analysis.py"))
analysis = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(analysis)


class HashesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        roots = (self.root, self.root / "common/include", self.root / "proto")
        for name, value in (("ROOT", self.root), ("INCLUDE_ROOTS", roots)):
            patch = mock.patch.object(analysis, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        ran = mock.Mock(stdout="LLVM version 14.0.6")
        patch = mock.patch.object(analysis.subprocess, "run", return_value=ran)
        patch.start()
        self.addCleanup(patch.stop)
        self.write(".clang-tidy", "Checks: a")
        self.write("server/a.cc", '#include <vector>\n#include "server/a.h"\n#include "ps/v1/ps.pb.h"\n')
        self.write("server/a.h", "#include <ps/tensor.h>\n")
        self.write("common/include/ps/tensor.h", "")
        self.write("proto/ps/v1/ps.proto", "")
        self.write("server/b.h", "")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def hash(self):
        return analysis.Hashes().of(self.root / "server/a.cc")

    def test_what_a_source_includes_at_any_depth_changes_its_hash(self):
        for name in ("server/a.cc", "server/a.h", "common/include/ps/tensor.h", "proto/ps/v1/ps.proto", ".clang-tidy"):
            before = self.hash()
            self.write(name, (self.root / name).read_text() + "// changed\n")
            assert self.hash() != before, name

    def test_what_it_does_not_include_leaves_its_hash(self):
        before = self.hash()
        self.write("server/b.h", "// changed\n")
        assert self.hash() == before


if __name__ == "__main__":
    unittest.main()
