"""A relay that passes calls of gRPC on, and makes some of them twice: what a client's retries and a slow network do.

    relay.py LOG CHANCE SEED TARGET...

Prints `relay TARGET ADDRESS` for each target. It knows nothing of the messages: a call is some bytes there, and some
back. A call is doubled in one of three ways:

    again   the first one's answer is lost, and the client, which asked again, gets that of the second;
    beside  the same, but the second comes while the first one has no answer yet;
    late    the client has the first one's answer, and then the call comes to the server once more.

A Leave is doubled late only: servers end when they have answered the last one, so that nobody is left to answer
it again.
"""

import asyncio
import contextlib
import functools
import json
import os
import random
import sys
import time

import grpc

ENDLESS = ("/Watch", "/Follow")  # Calls that are no question: they last as long as their caller does.
HOWS = ["again", "beside", "late"]
LATER_S = 0.02  # The second call comes within this time after what it waits for.
ORPHANED_S = 1.0  # Whoever started the relay is gone: look so often.
ANY_LENGTH = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SERVER = [*ANY_LENGTH, ("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000)]
CHANNEL = [
    *ANY_LENGTH,
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class Relay(grpc.GenericRpcHandler):
    def __init__(self, target, chance_of_two, chance, log):
        # A second call is not bound to come after the first: it has a connection of its own.
        self._channels = [grpc.aio.insecure_channel(target, CHANNEL) for _ in range(2)]
        self._chance_of_two, self._chance, self._log = chance_of_two, chance, log
        self._unheard = set()  # Calls whose answers nobody waits for.

    def service(self, details):
        """Streams both ways: on the wire a single message is a stream of one."""
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._serve, details.method))

    async def _serve(self, method, requests, context):
        twice = not method.endswith(ENDLESS) and self._chance.random() < self._chance_of_two
        how = self._chance.choice(["late"] if method.endswith("/Leave") else HOWS) if twice else "once"
        kept = [] if twice else None
        with self._open(0, method, context) as first, _sending(first, requests, kept) as sent:
            if how in ("once", "late"):
                await _answer(first, context)
            elif how == "beside":
                await sent
                self._spawn(_drain(first))
            elif await _drain(first) != grpc.StatusCode.OK:
                return await _end(first, context)
            if how == "once":
                return await _end(first, context)
            await asyncio.sleep(self._chance.uniform(0, LATER_S))
            if how == "late":
                self._spawn(self._late(method, kept, first))
                return await _end(first, context)
            with self._open(1, method, context) as second, _sending(second, _each(kept)):
                await _answer(second, context)
                await self._note(method, how, first, second)
                return await _end(second, context)

    @contextlib.contextmanager
    def _open(self, channel, method, context):
        call = self._channels[channel].stream_stream(method)(timeout=context.time_remaining() if context else None)
        try:
            yield call
        finally:
            call.cancel()  # The caller has gone, unless the call is over.

    async def _late(self, method, kept, first):
        with self._open(1, method, None) as second, _sending(second, _each(kept)):
            await _drain(second)
            await self._note(method, "late", first, second)

    def _spawn(self, coroutine):
        task = asyncio.ensure_future(coroutine)
        self._unheard.add(task)
        task.add_done_callback(self._unheard.discard)

    async def _note(self, method, how, first, second):
        """The first one's status may come later, or never."""
        codes = [(await call.code()).name if call.done() else None for call in (first, second)]
        line = {"unix_time": round(time.time(), 3), "method": method.rsplit("/", 1)[1], "how": how, "codes": codes}
        if codes[1] not in ("OK", None):
            line["details"] = await second.details()
        self._log.write(json.dumps(line) + "\n")


async def _each(messages):
    for message in messages:
        yield message


@contextlib.contextmanager
def _sending(call, requests, kept=None):
    async def send():
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # It has ended: its status says why.
            async for message in requests:
                if kept is not None:
                    kept.append(message)
                await call.write(message)
            await call.done_writing()

    task = asyncio.ensure_future(send())
    try:
        yield task
    finally:
        task.cancel()


async def _answer(call, context):
    with contextlib.suppress(grpc.RpcError):
        async for reply in call:
            await context.write(reply)


async def _drain(call):
    with contextlib.suppress(grpc.RpcError):
        async for _ in call:
            pass
    return await call.code()


async def _end(call, context):
    code = await call.code()
    if code != grpc.StatusCode.OK:
        await context.abort(code, await call.details())


async def main():
    log_path, chance_of_two, seed, *targets = sys.argv[1:]
    parent = os.getppid()
    servers = []  # Each ends with its last reference.
    with open(log_path, "w", buffering=1) as log:
        for target in targets:
            server = grpc.aio.server(options=SERVER)
            relay = Relay(target, float(chance_of_two), random.Random(f"relay {seed} {target}"), log)
            server.add_generic_rpc_handlers([relay])
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            print(f"relay {target} 127.0.0.1:{port}", flush=True)
            servers.append(server)
        while os.getppid() == parent:
            await asyncio.sleep(ORPHANED_S)


if __name__ == "__main__":
    asyncio.run(main())
