"""Output of several processes as whole lines of one."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

READ_BYTES = 64 << 10
_LINE_BYTES_MAX = 64 << 10
_ERROR_BYTES_MAX = 500
# When so much is there that nobody has read, the processes wait, as they would for a pipe.
_QUEUED_BYTES_MAX = 1 << 20


class Lines:
    """Cuts a stream of bytes into lines and puts a prefix before each. Bytes that are not UTF-8 stay as they are.

    A carriage return ends a line, too, so that each update of a progress bar is one. A line that does not end within
    64 KiB goes on in the next.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""  # The beginning of a line, at most _LINE_BYTES_MAX.

    def feed(self, data: bytes) -> bytes:
        """The lines that end in `data`."""
        data = self._rest + data
        if b"\r" in data:
            half = data.endswith(b"\r")  # The next bytes may make it \r\n.
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if half else b"")
        lines = data.split(b"\n")
        self._rest = lines.pop()
        whole = [piece for line in lines for piece in self._pieces(line)]
        if len(self._rest) > _LINE_BYTES_MAX:
            *more, self._rest = self._pieces(self._rest)
            whole += more
        return self._join(whole)

    def end(self) -> bytes:
        """What is left when the stream has ended."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return self._join([rest] if rest else [])

    def _join(self, lines: list[bytes]) -> bytes:
        return b"".join(self._prefix + line + b"\n" for line in lines)

    @staticmethod
    def _pieces(line: bytes) -> list[bytes]:
        if len(line) <= _LINE_BYTES_MAX:
            return [line]
        return [line[at : at + _LINE_BYTES_MAX] for at in range(0, len(line), _LINE_BYTES_MAX)]


class LastError:
    """The last line of the last traceback among lines that have this prefix, as in "ValueError: no such file"."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._inside = False
        self.text = ""

    def feed(self, lines: bytes) -> None:
        """Takes whole lines."""
        for whole in lines.splitlines():
            line = whole.removeprefix(self._prefix)
            if line == b"Traceback (most recent call last):":
                self._inside = True
            elif self._inside and line and not line[:1].isspace():  # What is in between is indented.
                self._inside = False
                self.text = line[:_ERROR_BYTES_MAX].decode(errors="replace")


class Sink(ABC):
    """Where lines go. One that writes at once needs only put()."""

    @abstractmethod
    def put(self, fd: int, data: bytes) -> None:
        """Takes whole lines for stdout (1) or stderr (2). Never waits."""

    @property
    def fd(self) -> int | None:
        """If there is something to write: where to. Once that is writable, write() is to be called."""
        return None

    @property
    def full(self) -> bool:
        """Too much waits to be written: whoever gives lines should wait, too."""
        return False

    def write(self) -> None:  # noqa: B027
        """Writes some of it, without waiting."""


class Output(Sink):
    """Our own stdout and stderr. They are written in the order in which they were put in, so that lines stay whole on a
    terminal that shows both. `on_closed` is called once nobody reads one of them any more; what is for it is dropped.
    """

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._bytes = 0
        self._closed: set[int] = set()

    def put(self, fd: int, data: bytes) -> None:
        if not data or fd in self._closed:
            return
        self._bytes += len(data)
        if self._queue and self._queue[-1][0] == fd:
            self._queue[-1][1].extend(data)
        else:
            self._queue.append((fd, bytearray(data)))

    @property
    def fd(self) -> int | None:
        return self._queue[0][0] if self._queue else None

    @property
    def full(self) -> bool:
        return self._bytes >= _QUEUED_BYTES_MAX

    def write(self) -> None:
        fd, data = self._queue[0]
        try:
            # A pipe that is writable takes so much at once.
            written = os.write(fd, data[: select.PIPE_BUF])
        except BlockingIOError:  # Somebody made it non-blocking, and somebody else was faster.
            return
        except OSError:
            self._closed.add(fd)
            written = len(data)
            self._on_closed()
        self._bytes -= written
        del data[:written]
        if not data:
            self._queue.popleft()
