"""What events are to do is really done: clocks jump, packets are lost, calls come twice. effects_test.py BUILD_FOLDER.

What cannot be done here is skipped, as the chaos run leaves it out.
"""

import collections
import ctypes
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile
import time
import types
import unittest
from concurrent import futures

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # job.py

import clock
import doubles
import packets
from job import wait_until

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # The number of the system call.
WAIT_UNTIL = 9 | 128 | 256  # FUTEX_WAIT_BITSET, FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
HOUR_S = 3600


def tell_time():
    """In a process of its own: at each line that it reads, it tells both clocks."""
    for _ in sys.stdin:
        print(time.time(), time.monotonic(), flush=True)


def wait_for(seconds):
    """In a process of its own: waits until a time of the wall clock, and tells how long that was by the steady one."""
    now, word = time.time() + seconds, ctypes.c_int(0)
    until = (ctypes.c_long * 2)(int(now), int(now % 1 * 1e9))
    print("waiting", flush=True)
    began = time.monotonic()
    arguments = [FUTEX, ctypes.byref(word), WAIT_UNTIL, 0, until, None, -1]
    ctypes.CDLL(None).syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    print(time.monotonic() - began, flush=True)


@unittest.skipUnless(clock.can_jump(), "there is no library that moves the clock")
class Clocks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.clock = clock.WallClock(pathlib.Path(folder.name) / "clock")

    def child(self, *arguments):
        command = [sys.executable, "-B", __file__, "build", *arguments]
        environment = {"PATH": "/usr/bin:/bin"} | self.clock.environment()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        process = subprocess.Popen(command, env=environment, **pipes)
        self.addCleanup(lambda: (process.kill(), process.communicate()))
        return process

    def test_the_wall_clock_jumps_and_the_steady_one_does_not(self):
        child = self.child("tell_time")
        for moved in (0, 2 * HOUR_S, 2 * HOUR_S, -5 * HOUR_S):
            self.clock.jump(moved - self.clock.moved())
            print("now", file=child.stdin, flush=True)
            wall, steady = map(float, child.stdout.readline().split())
            assert abs(wall - time.time() - moved) < 5
            assert abs(steady - time.monotonic()) < 5

    def waited(self, seconds, moved_before, moved_meanwhile):
        self.clock.jump(moved_before - self.clock.moved())
        child = self.child("wait_for", str(seconds))
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        self.clock.jump(moved_meanwhile)
        return float(child.stdout.readline())

    @unittest.skipIf(FUTEX is None, "the number of the system call is not known here")
    def test_waits_jump_with_it(self):
        for moved in (-HOUR_S, HOUR_S):
            assert 0.25 < self.waited(0.3, moved, 0) < 3
        assert self.waited(HOUR_S, 0, 2 * HOUR_S) < 10
        assert self.waited(0.3, 0, -1) > 1.0


@unittest.skipUnless(packets.are_own(), "there is no network of its own")
class Packets(unittest.TestCase):
    def setUp(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.near = socket.create_connection(listener.getsockname())
        self.far, _ = listener.accept()
        self.addCleanup(self.near.close)
        self.addCleanup(self.far.close)

    def arrives(self, sender, receiver):
        sender.send(b"x")
        receiver.settimeout(0.2)
        try:
            return receiver.recv(1) == b"x"
        except TimeoutError:
            return False

    def test_only_what_goes_that_way_is_lost_and_it_comes_later(self):
        for direction, there, back in (("there", False, True), ("back", True, False), ("both", False, False)):
            with self.subTest(direction), packets.Drops() as drops:
                end = drops.begin(self.address, direction)
                assert self.arrives(self.near, self.far) == there
                if there != back:  # Else acknowledgements are lost with it.
                    assert self.arrives(self.far, self.near) == back
                end()
                assert drops.packets > 0
                lost = self.far if not there else self.near
                lost.settimeout(10)
                assert lost.recv(1) == b"x"


@unittest.skipUnless(doubles.can_be(), "there is no module grpc")
class Doubles(unittest.TestCase):
    """Of a server that counts calls, and answers with what it was sent."""

    def setUp(self):
        import grpc

        calls = self.calls = collections.Counter()

        class Echo(grpc.GenericRpcHandler):
            def service(self, details):
                def serve(requests, context):
                    calls[details.method] += 1
                    yield b"".join(requests)

                return grpc.stream_stream_rpc_method_handler(serve)

        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[Echo()])
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        folder = tempfile.TemporaryDirectory()
        run = types.SimpleNamespace(folder=pathlib.Path(folder.name), wait_until=wait_until)
        self.relay = doubles.Relay(run, 1, [target], chance=1)
        channel = self.channel = grpc.insecure_channel(self.relay.address(target))
        for clean in (folder.cleanup, self.relay.program.kill, lambda: server.stop(None), channel.close):
            self.addCleanup(clean)

    def test_calls_come_twice_and_are_answered_once(self):
        for number in range(30):
            text = str(number).encode()
            assert self.channel.unary_unary("/a.B/One")(text, timeout=10) == text
            answers = self.channel.stream_stream("/a.B/Many")(iter([text, b"-", text]), timeout=10)
            assert list(answers) == [text + b"-" + text]
        wait_until("all calls", lambda: self.calls == {"/a.B/One": 60, "/a.B/Many": 60}, 10)
        wait_until("what is written of them", lambda: len(self.relay.doubled()) == 60, 10)
        assert {call["how"] for call in self.relay.doubled()} == {"again", "beside", "late"}

    def test_what_lasts_is_passed_on(self):
        assert self.channel.unary_unary("/a.B/Watch")(b"once", timeout=10) == b"once"
        assert self.calls == {"/a.B/Watch": 1}


if __name__ == "__main__":
    asked = sys.argv[2:]
    if asked[:1] == ["tell_time"]:
        tell_time()
    elif asked[:1] == ["wait_for"]:
        wait_for(float(asked[1]))
    else:
        if not packets.are_own():
            packets.enter()
        unittest.main(argv=sys.argv[:1])
