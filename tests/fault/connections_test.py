"""Callers who only connect keep nobody out for long: connections_test.py BUILD_FOLDER CASE."""

import contextlib
import pathlib
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from job import BIN, LIMIT, MODEL, wait_until

FEW = 128  # Descriptors.
FULL = "no room for more connections"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse, in proto/grpc/health/v1/health.proto.


class Server:
    """A server that begins with these limits of open descriptors; what it prints is kept."""

    def __init__(self, folder, soft, hard, listen="127.0.0.1:0", more=()):
        self.err = pathlib.Path(folder) / "server.err"
        command = [str(BIN / "ps_server"), "--num_workers=1", f"--listen={listen}", *more]
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


class Between:
    """Passes connections on to a server. What comes from there it reads at this many bytes a second, of each (None: as
    it comes), or not at all while it is held.
    """

    def __init__(self, address, rate=None):
        host, port = address.rsplit(":", 1)
        self.server, self.rate = (host, int(port)), rate
        self.flows = threading.Event()
        self.flows.set()
        self.lets_in = True
        self.refused = 0
        self.open = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                worker, _ = self.listener.accept()
            except OSError:
                return  # Closed.
            if not self.lets_in:
                worker.close()
                self.refused += 1
                continue
            server = socket.socket()
            server.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10
            )  # Before it connects: the rest waits there.
            server.connect(self.server)
            self.open += [worker, server]
            for source, to, back in ((worker, server, False), (server, worker, True)):
                threading.Thread(target=self._pass, args=(source, to, back), daemon=True).start()

    def reset(self):
        """Ends all connections, with what is held; later ones are not held."""
        for end in self.open:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.flows.set()

    def _pass(self, source, to, back):
        flows = self.flows
        with contextlib.suppress(OSError):
            while data := source.recv(8 << 10):
                if back:
                    flows.wait(LIMIT)
                to.sendall(data)
                if back and self.rate is not None:
                    time.sleep(len(data) / self.rate)  # This is the link.
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def slow_weights():
    """Heartbeats do not wait behind weights that take several leases."""
    short = ["--lease=2s", "--reconnect_grace=2s", "--optimizer=sgd"]
    large = ["--dataset=synthetic:samples=16,features=1000,classes=4", "--model=mlp:1000,1000,4", "--batch_size=8"]
    with tempfile.TemporaryDirectory() as folder, Server(folder, 1024, 1024, more=short) as server:
        slow = Between(server.address, 1 << 20)
        command = [str(BIN / "ps_worker"), f"--server={slow.address}", "--shared_memory=off", "--steps=1", *large]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        slow.listener.close()
        assert done.returncode == 0, done.stderr + server.errors()
        assert server.process.wait(LIMIT) == 0, server.errors()


def finished():
    """A shard whose connection to the chief breaks just as the job is finished hears of that when it is back."""
    shards = ["--num_shards=2", "--mode=asp"]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two, contextlib.ExitStack() as servers:
        chief = servers.enter_context(Server(one, 1024, 1024, more=shards))
        between = Between(chief.address)
        follows = [*shards, "--shard=1", f"--chief={between.address}"]
        shard = servers.enter_context(Server(two, 1024, 1024, more=follows))
        # A shard that applies each push by itself needs no word of the chief until the end.
        metrics = pathlib.Path(two) / "metrics"
        metrics.touch()
        command = [str(BIN / "ps_worker"), f"--server={chief.address}", "--steps=50", *MODEL]
        command += ["--experiment_step_time=20ms", f"--metrics_file={metrics}"]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until("training, so that each shard has heard of it", lambda: '"step":5,' in metrics.read_text())
        between.flows.clear()
        assert worker.wait(LIMIT) == 0
        wait_until("the end", lambda: "the job is finished" in chief.errors())
        between.reset()
        assert shard.process.wait(LIMIT) == 0, shard.errors()
        assert chief.process.wait(LIMIT) == 0, chief.errors()
        between.listener.close()


def kept():
    """Servers that are kept serve the weights, and end together, though one was cut off for longer than the lease."""
    shards = ["--num_shards=2", "--lease=1s", "--keep_running"]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two, contextlib.ExitStack() as servers:
        chief = servers.enter_context(Server(one, 1024, 1024, more=shards))
        between = Between(chief.address)
        follows = [*shards, "--shard=1", f"--chief={between.address}"]
        shard = servers.enter_context(Server(two, 1024, 1024, more=follows))
        ask = [str(BIN / "ps_ctl"), f"--server={chief.address}"]
        worker = [str(BIN / "ps_worker"), f"--server={chief.address}", "--steps=5", *MODEL]
        assert subprocess.run(worker, capture_output=True, timeout=LIMIT).returncode == 0
        wait_until("the end", lambda: "the job is finished; this server is kept" in shard.errors())
        between.lets_in = False
        between.reset()
        wait_until("the loss", lambda: between.refused > 0)
        lost = time.monotonic()
        wait_until("more than the lease", lambda: time.monotonic() > lost + 2)  # That is what is tested.
        between.lets_in = True

        def hashed():
            return subprocess.run([*ask, "weights_hash"], capture_output=True, text=True, timeout=LIMIT).returncode == 0

        wait_until("the weights", hashed)
        assert subprocess.run([*ask, "shutdown"], capture_output=True, timeout=LIMIT).returncode == 0
        for server in (chief, shard):
            assert server.process.wait(LIMIT) == 0, server.errors()
        between.listener.close()


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


{case.__name__: case for case in (closed, closed_unix, silent, health, raised, pings, slow_weights, finished, kept)}[
    sys.argv[2]
]()
