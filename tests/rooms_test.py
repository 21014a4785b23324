"""cmake/CheckRoom.cmake, which looks at what a room includes: an include the wrong way ends the build, and is named."""

import pathlib
import subprocess
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parents[1] / "cmake/CheckRoom.cmake"


class RoomsTest(unittest.TestCase):
    def check(self, includes, uses="server/base,server/config", file="server/engine/updater.cc"):
        """Checks server/engine with one file of these lines: the status, the output, and whether it was stamped."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            source = root / file
            source.parent.mkdir(parents=True)
            source.write_text("\n".join(includes) + "\n")
            stamp = root / "stamp"
            command = [
                "cmake",
                "-DROOM=server/engine",
                f"-DUSES={uses}",
                f"-DROOT={root}",
                f"-DSTAMP={stamp}",
                "-P",
                CHECK,
            ]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
            return ran.returncode, " ".join((ran.stdout + ran.stderr).split()), stamp.exists()

    def test_what_a_room_may_include_passes(self):
        allowed = [
            "#include <vector>",
            '#include "absl/status/status.h"',
            '#include "common/clock.h"',
            '#include "server/config/options.h"',
            '#include "server/engine/reduce.h"',
        ]
        status, output, stamped = self.check(allowed)
        assert (status, stamped) == (0, True), output

    def test_an_include_the_wrong_way_is_named_with_its_file(self):
        for wrong in ("server/shard/shard.h", "server/server.h", "worker/link/shard_link.h"):
            status, output, stamped = self.check([f'#include "{wrong}"'])
            assert status != 0, output
            assert not stamped
            assert f'server/engine/updater.cc: #include "{wrong}"' in output
            assert "server/engine may include server/base, server/config and itself" in output

    def test_folders_within_a_room_are_looked_at_too(self):
        status, output, _ = self.check(['#include "server/chief/chief.h"'], file="server/engine/deep/file.h")
        assert status != 0
        assert "server/engine/deep/file.h" in output


if __name__ == "__main__":
    unittest.main()
