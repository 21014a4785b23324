"""The ps_server processes of tests, on free ports."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

WAIT_S = 30.0


class ServerProcesses:
    """The servers of jobs. Each can be killed, and started again with its own command at the address that it had."""

    def __init__(self, log: Path | None = None) -> None:
        """None yet. What they log goes to this file, or else to stderr."""
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []
        self._commands: list[list[str]] = []
        self._log = log

    def start(self, num_workers: int, *flags: str, shards: int = 1, mode: str = "bsp") -> str:
        """Returns the chief's address. The optimizer is the worker's unless a flag says otherwise."""
        from psgrad._supervisor import find_program  # Some tests do without the compiled module.

        chief = ""
        for shard in range(shards):
            command = [find_program("ps_server"), "--listen=127.0.0.1:0", "--optimizer=from_worker"]
            command += [f"--num_workers={num_workers}", f"--mode={mode}", f"--num_shards={shards}", f"--shard={shard}"]
            command += [*([f"--chief={chief}"] if chief else []), *flags]
            process, address = self._run(command)
            self.processes.append(process)
            self.addresses.append(address)
            self._commands.append([*command, f"--listen={address}"])
            chief = chief or address
        return chief

    def kill(self, shard: int = 0) -> None:
        """SIGKILL."""
        process = self.processes[shard]
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()

    def start_again(self, shard: int = 0, *flags: str) -> None:
        """After kill. Later flags win."""
        self.processes[shard], _ = self._run([*self._commands[shard], *flags])

    def wait(self) -> list[int]:
        """Their exit statuses, once all have ended by themselves."""
        return [process.wait(WAIT_S) for process in self.processes]

    def end(self) -> None:
        """Ends those that run."""
        for number in range(len(self.processes)):
            self.kill(number)

    def _run(self, command: list[str]) -> tuple[subprocess.Popen[str], str]:
        if self._log is None:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        else:
            with open(self._log, "a", encoding="utf-8") as log:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            process.kill()
            raise AssertionError(f"{command}: {line!r}; {self._log and self._log.read_text(encoding='utf-8')}")
        return process, line.removeprefix("listening on ").strip()


class Restartable(ServerProcesses):
    """Servers with checkpoints."""

    def __init__(self, folder: Path) -> None:
        """None yet; what they write goes to the folder."""
        super().__init__(folder / "servers.log")
        self.folder = folder

    def start(self, num_workers: int, *flags: str, every: str = "10", keeps: bool = True, **options: Any) -> str:
        """`every`: --checkpoint_every; keeps=False: there are no checkpoints."""
        if keeps:
            flags = (f"--checkpoint_dir={self.folder / 'checkpoints'}", f"--checkpoint_every={every}", *flags)
        return super().start(num_workers, *flags, **options)
