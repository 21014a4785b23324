"""Callers who only connect keep nobody out for long: connections_test.py BUILD_FOLDER CASE."""

import pathlib
import resource
import socket
import struct
import subprocess
import sys
import tempfile

from job import BIN, LIMIT, MODEL, wait_until

FEW = 128  # Descriptors.
FULL = "no room for more connections"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse, in proto/grpc/health/v1/health.proto.


class Server:
    """A server that begins with these limits of open descriptors; what it prints is kept."""

    def __init__(self, folder, soft, hard, listen="127.0.0.1:0"):
        self.err = pathlib.Path(folder) / "server.err"
        command = [str(BIN / "ps_server"), "--num_workers=1", f"--listen={listen}"]
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # noqa: E731
        with open(self.err, "wb") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, preexec_fn=limit)
        self.address = self.process.stdout.readline().split()[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(LIMIT)
        self.process.stdout.close()

    def errors(self):
        return self.err.read_text(errors="replace")

    def open_descriptors(self):
        return len(list(pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def connect(self):
        if self.address.startswith("unix:"):
            caller = socket.socket(socket.AF_UNIX)
            caller.settimeout(LIMIT)
            caller.connect(self.address.removeprefix("unix:"))
            return caller
        host, port = self.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), LIMIT)

    def trains(self):
        """A worker comes in, and the job ends well."""
        worker = [str(BIN / "ps_worker"), f"--server={self.address}", "--steps=3", *MODEL]
        done = subprocess.run(worker, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        assert self.process.wait(LIMIT) == 0, self.errors()


def closed(listen="127.0.0.1:0"):
    """More callers than there are descriptors, who then go again."""
    with tempfile.TemporaryDirectory() as folder, Server(folder, FEW, FEW, listen.format(folder)) as server:
        callers = [server.connect() for _ in range(2 * FEW)]
        wait_until("a line that says so", lambda: FULL in server.errors())
        assert server.open_descriptors() < FEW, "some are left for files"
        for caller in callers:
            caller.close()
        server.trains()
        lines = [line for line in server.errors().splitlines() if FULL in line]
        assert len(lines) <= LIMIT and "ulimit -n" in lines[0], server.errors()


def closed_unix():
    closed("unix:{}/socket")


def silent():
    """They stay, and say nothing: the server ends what has not begun to speak HTTP/2."""
    with tempfile.TemporaryDirectory() as folder, Server(folder, FEW, FEW) as server:
        callers = [server.connect() for _ in range(2 * FEW)]
        wait_until("a line that says so", lambda: FULL in server.errors())
        server.trains()
        for caller in callers:
            caller.close()


def health():
    """Who watches it learns that there is no room, and then that there is again."""
    try:
        import grpc
    except ImportError as error:
        print(f"SKIPPED: {error}")
        return
    with tempfile.TemporaryDirectory() as folder, Server(folder, FEW, FEW) as server:
        with grpc.insecure_channel(server.address) as channel:
            as_it_is = {"request_serializer": bytes, "response_deserializer": bytes}
            states = channel.unary_stream("/grpc.health.v1.Health/Watch", **as_it_is)(b"", timeout=LIMIT)
            while next(states) != SERVING:  # It begins a moment after it listens.
                pass
            callers = [server.connect() for _ in range(2 * FEW)]
            assert next(states) == NOT_SERVING
            for caller in callers:
                caller.close()
            assert next(states) == SERVING
            states.cancel()
        server.trains()


def raised():
    """The soft limit is raised to the hard one."""
    hard = min(4 * FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with tempfile.TemporaryDirectory() as folder, Server(folder, FEW, hard) as server:
        callers = [server.connect() for _ in range(2 * FEW)]
        wait_until("all to be taken in", lambda: server.open_descriptors() > 2 * FEW)
        server.trains()
        assert FULL not in server.errors(), server.errors()
        for caller in callers:
            caller.close()


def frame(kind, payload=b"", stream=0):
    """Of HTTP/2 (RFC 9113, 4.1), without flags."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + struct.pack(">I", stream) + payload


def memory(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


def pings():
    """Whose answers are not read: the server reads no more of them then."""
    with tempfile.TemporaryDirectory() as folder, Server(folder, FEW, FEW) as server:
        before = memory(server)
        caller = server.connect()
        caller.settimeout(2)  # The server has stopped reading when nothing of the next part goes out for this long.
        caller.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4))
        try:
            for _ in range(64):  # MB.
                caller.sendall(frame(6, b"12345678") * (1 << 20 >> 4))
        except TimeoutError:
            pass
        except ConnectionError:
            pass
        assert memory(server) - before < 200, f"{memory(server)} MB, {before} before"
        server.trains()
        caller.close()


{case.__name__: case for case in (closed, closed_unix, silent, health, raised, pings)}[sys.argv[2]]()
