"""TCP proxies inside the test that forward, hold back, swallow or reset what passes."""

import asyncio
import contextlib
import socket
import struct
import threading

CHUNK = 1 << 16
HARD_CLOSE = struct.pack("ii", 1, 0)  # Of SO_LINGER: the other side sees a reset.


class Link:
    """One listening address, and where it leads. Its methods are called by any thread."""

    def __init__(self, proxies):
        self._proxies, self._loop = proxies, proxies.loop
        self._target = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._delay_s = 0.0
        self._reset_after = 0  # Messages from the target; 0: not.
        self._hold_at = None  # What the target sends.
        self.held = threading.Event()
        self._writers = set()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def lead_to(self, address):
        self._target = address.rsplit(":", 1)

    def swallow(self):
        """Nothing passes any more. What came is kept, as a network keeps it that loses packets for a while."""
        self._call(self._passing.clear)

    def heal(self):
        self._call(self._passing.set)

    def delay(self, seconds):
        self._delay_s = seconds

    def reset(self):
        self._call(self._reset)

    def reset_after(self, messages):
        self._reset_after = messages

    def hold_at(self, text):
        """From the first message on that has these bytes, nothing of what the target sends passes, until heal."""
        self._hold_at = text

    def _call(self, function):
        self._loop.call_soon_threadsafe(function)

    async def _listen(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._proxies.servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        far_writer = None
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            there = asyncio.ensure_future(self._pump(reader, far_writer, counts=False))
            back = asyncio.ensure_future(self._pump(far_reader, writer, counts=True))
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            back.cancel()
        except OSError:
            pass
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    self._writers.discard(end)
                    with contextlib.suppress(OSError):
                        end.transport.abort()

    async def _pump(self, reader, writer, counts):
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if counts and self._hold_at is not None and self._hold_at in data:
                    self._hold_at = None
                    self._passing.clear()
                    self.held.set()
                await self._passing.wait()
                if self._delay_s > 0:
                    await asyncio.sleep(self._delay_s)
                if counts and self._reset_after > 0:
                    self._reset_after -= 1
                    if self._reset_after == 0:
                        return self._reset()
                writer.write(data)
                await writer.drain()

    def _reset(self):
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD_CLOSE)
            writer.transport.abort()


class Proxies:
    """The thread that all links share. Use it as `with Proxies() as proxies`."""

    def __init__(self):
        self.loop, self.servers = asyncio.new_event_loop(), []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end(self):
        for server in self.servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
