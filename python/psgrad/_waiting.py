"""Waits of the client: Ctrl-C ends each, and what it waits for is logged meanwhile."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from psgrad import _core

LOG = logging.getLogger("psgrad")

# Between two looks at signals and at what the client has to say.
_POLL_S = 0.2
# For what was interrupted to end.
_STOP_S = 0.5

_T = TypeVar("_T")


def until(poll: Callable[[float], _T | None], client: _core.Client, timeout: float | None, what: str) -> _T:
    """What ``poll(seconds)`` returns once it is something. Signals are handled in between: Ctrl-C ends it."""
    end = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            left = _POLL_S if end is None else min(_POLL_S, max(0.0, end - time.monotonic()))
            result = poll(left)
            if result is not None:
                return result
            log_notices(client)
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{what}: not within {timeout} s")
    except Exception:
        raise
    except BaseException:  # Ctrl-C, or what a handler of a signal raises.
        client.stop()
        with contextlib.suppress(_core.Error):
            poll(_STOP_S)
        raise
    finally:
        log_notices(client)


def log_notices(client: _core.Client) -> None:
    for notice in client.take_notices():
        # What it waits for is to be seen also where nobody has set up logging.
        LOG.log(logging.INFO if notice.startswith("exchanging with ") else logging.WARNING, "%s", notice)


def call(running: _core.Call, client: _core.Client) -> Any:
    until(lambda seconds: True if running.wait_for(seconds) else None, client, None, "")
    return running.result()
