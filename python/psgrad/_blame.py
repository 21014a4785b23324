"""Who is to blame when several processes of a job fail: an error may be the consequence of another one's."""

from __future__ import annotations

# A worker that ends by one of these does so because of another, or of a server.
_OF_OTHERS = tuple(f"psgrad.{name}" for name in ("JobFailed", "ShutDown", "Unavailable", "RolledBack", "Cancelled"))


def is_of_another(error: BaseException | str) -> bool:
    """Whether this error, or the last line of its traceback, is another process's doing."""
    if isinstance(error, str):
        return error.partition(":")[0] in _OF_OTHERS
    return any(f"{kind.__module__}.{kind.__qualname__}" in _OF_OTHERS for kind in type(error).__mro__)
