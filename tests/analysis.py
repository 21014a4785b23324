#!/usr/bin/env python3
"""Reads the project's sources with clang-tidy and Clang's thread-safety analysis, but for those that it knows.

usage: analysis.py BUILD LIST [--each]

BUILD is a folder that CMake has configured, with compile_commands.json and the generated headers. LIST is a file with a
line for each source that had no finding: a hash of that source, of all files of the project that it includes, of
.clang-tidy, of the checks that are left out and of clang-tidy's version. A source whose hash is there is not read
again, and what is read without a finding is noted there.

Headers take most of the time, so what is to be read is read in groups of up to 48 sources of one target. That hides a
source that does not include what it uses. --each reads every source by itself, with Clang's static analyzer, whatever
LIST says.

Exit status: 0 no finding, 1 findings, which are printed.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("common", "server", "worker", "tests")
INCLUDE_ROOTS = (ROOT, ROOT / "common/include", ROOT / "worker/client/include", ROOT / "proto")
GROUP_MAX = 48
CHECKS_OF_GROUPS = "-clang-analyzer-*,-bugprone-suspicious-include"
HEADERS = r"/(common|server|worker|tests)/[^:]*\.(h|cuh|cc)$"
READ_LIMIT_S = 1500


class Hashes:
    """The hash of a source with all of the project's files that it includes."""

    def __init__(self):
        version = subprocess.run(["clang-tidy", "--version"], check=True, capture_output=True, text=True).stdout
        self._base = (ROOT / ".clang-tidy").read_bytes() + re.search(r"version \S+", version).group().encode()
        self._base += CHECKS_OF_GROUPS.encode()
        self._includes = {}

    def of(self, source):
        reached, to_visit = set(), [source]
        while to_visit:
            path = to_visit.pop()
            if path not in reached:
                reached.add(path)
                to_visit += self._included_by(path)
        total = hashlib.sha256(self._base)
        for path in sorted(reached):
            total.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()[:32]

    def _included_by(self, path):
        if path not in self._includes:
            names = re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE)
            self._includes[path] = [found for name in names if (found := self._find(name, path.parent))]
        return self._includes[path]

    @staticmethod
    def _find(name, folder):
        name = re.sub(r"(\.grpc)?\.pb\.h$", ".proto", name)  # Generated, so the source of it.
        for root in (folder, *INCLUDE_ROOTS):
            if (path := root / name).is_file() and ROOT in path.resolve().parents:
                return path.resolve()
        return None


def own(path):
    return path.suffix == ".cc" and any(ROOT / folder in path.parents for folder in FOLDERS)


def groups_to_read(commands, is_known):
    """The compile commands, each with those sources of its target that are to be read with it."""
    by_target = {}
    for command in commands:
        source = pathlib.Path(os.path.normpath(os.path.join(command["directory"], command["file"])))
        if own(source) and not is_known(source):
            target = re.search(r"CMakeFiles/([^/ ]+)\.dir/", command["command"]).group(1)
            # Sources with flags of their own stay apart.
            flags = re.sub(r" -o .*", "", command["command"])
            by_target.setdefault((target, flags), []).append((source, command))
    for members in by_target.values():
        for i in range(0, len(members), GROUP_MAX):
            group = members[i : i + GROUP_MAX]
            yield group[0][1], [source for source, _ in group]


def tidy(folder, file, options):
    command = ["clang-tidy", "-p", str(folder), "--quiet", *options, str(file)]
    extra = ("-Wthread-safety", "-Wno-unknown-warning-option", "-Wno-unused-command-line-argument")
    command[1:1] = [f"--extra-arg={argument}" for argument in extra]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=READ_LIMIT_S, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--each"]):
        sys.exit(__doc__)
    build, listed, each = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]), bool(sys.argv[3:])
    commands = json.loads((build / "compile_commands.json").read_text())
    hashes = Hashes()
    known = set(re.findall(r"^([0-9a-f]{32}) ", listed.read_text(), re.MULTILINE)) if listed.exists() else set()
    of = {}

    def is_known(source):
        of[source] = hashes.of(source)
        return not each and of[source] in known

    folder = build / "analysis"
    folder.mkdir(exist_ok=True)
    database, to_read = [], []
    for number, (command, sources) in enumerate(groups_to_read(commands, is_known)):
        if each:
            to_read += [(source, [source]) for source in sources]
            continue
        file = folder / f"group_{number}.cc"
        file.write_text("".join(f'#include "{source}"  // NOLINT\n' for source in sources))
        line = re.sub(r" -o .*", "", command["command"]) + f" -o {file}.o -c {file}"
        database.append({"directory": command["directory"], "command": line, "file": str(file)})
        to_read.append((file, sources))
    (folder / "compile_commands.json").write_text(json.dumps(database))
    # What one source keeps to itself is no business of the next one's.
    options = [] if each else [f"--header-filter={HEADERS}", f"--checks={CHECKS_OF_GROUPS}", "--extra-arg=-Wno-shadow"]
    print(f"{sum(len(sources) for _, sources in to_read)} of {len(of)} sources are to be read", flush=True)

    passed, status = {source for source in of if not each and of[source] in known}, 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {pool.submit(tidy, build if each else folder, file, options): sources for file, sources in to_read}
        for job in concurrent.futures.as_completed(jobs):
            code, output = job.result()
            if code != 0 or re.search(r"(warning|error): ", output):
                status = 1
                print(output, flush=True)
            else:
                passed.update(jobs[job])
    lines = sorted(f"{source.relative_to(ROOT)} {of[source]}" for source in passed)
    listed.write_text("".join("{1} {0}\n".format(*line.split(" ")) for line in lines))
    sys.exit(status)


if __name__ == "__main__":
    main()
