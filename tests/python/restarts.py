"""Servers with checkpoints, which tests kill and start again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

WAIT_S = 30.0


class Restartable:
    """The servers of a job. Each is started again with its own command, at the address that it had."""

    def __init__(self, folder: Path) -> None:
        """None yet; what they write goes to the folder."""
        self.folder = folder
        self.addresses: list[str] = []
        self._commands: list[list[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []

    def start(
        self, num_workers: int, *flags: str, shards: int = 1, mode: str = "bsp", every: str = "10", keeps: bool = True
    ) -> str:
        """Returns the chief's address. `every`: --checkpoint_every; keeps=False: there are no checkpoints."""
        from psgrad._supervisor import find_program

        for shard in range(shards):
            command = [
                find_program("ps_server"),
                f"--num_workers={num_workers}",
                f"--mode={mode}",
                f"--shard={shard}",
            ]
            command += [f"--num_shards={shards}", "--optimizer=from_worker", *flags]
            if keeps:
                command += [f"--checkpoint_dir={self.folder / 'checkpoints'}", f"--checkpoint_every={every}"]
            if shard > 0:
                command.append(f"--chief={self.addresses[0]}")
            process, address = self._run([*command, "--listen=127.0.0.1:0"])
            self._commands.append([*command, f"--listen={address}"])
            self._processes.append(process)
            self.addresses.append(address)
        return self.addresses[0]

    def kill(self, shard: int = 0) -> None:
        """SIGKILL."""
        self._processes[shard].kill()
        self._processes[shard].wait(WAIT_S)

    def start_again(self, shard: int = 0, *flags: str) -> None:
        """After kill. Later flags win."""
        self._processes[shard], _ = self._run([*self._commands[shard], *flags])

    def wait(self) -> list[int]:
        """Their exit statuses, once all have ended by themselves."""
        return [process.wait(WAIT_S) for process in self._processes]

    def end(self) -> None:
        """Ends those that run."""
        for process in self._all:
            process.kill()
            process.wait(WAIT_S)
            assert process.stdout is not None
            process.stdout.close()

    def _run(self, command: list[str]) -> tuple[subprocess.Popen[str], str]:
        with open(self.folder / "servers.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._all.append(process)
        assert process.stdout is not None
        listening = re.match(r"listening on (\S+)", process.stdout.readline())
        assert listening is not None, (self.folder / "servers.log").read_text(encoding="utf-8")
        return process, listening[1]
