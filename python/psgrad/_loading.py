"""How the compiled module is loaded, where another library has brought a gRPC of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys


def _has_foreign_grpc() -> bool:
    """Whether a gRPC's symbols are visible to all libraries, as TensorFlow's are: some of ours would be bound to them.

    TensorFlow 2.21 has libraries in which dlsym() finds nothing of gRPC, but the loader does; so they are told by name.
    """
    if hasattr(ctypes.CDLL(None), "grpc_init"):
        return True
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any("/libtensorflow_" in line for line in maps)
    return "tensorflow" in sys.modules


def _preloaded_malloc() -> str:
    """A malloc that was preloaded: with RTLD_DEEPBIND ours would use another one for the same memory."""
    for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if any(name in os.path.basename(library) for name in ("malloc", "asan", "tsan")):
            return library
    return ""


def load() -> None:
    """Loads psgrad._core. Libraries that were loaded before it must not take the place of those that it needs."""
    if "psgrad._core" in sys.modules:
        return
    if not _has_foreign_grpc():
        importlib.import_module("psgrad._core")
        return
    if malloc := _preloaded_malloc():
        raise ImportError(
            f"import psgrad before tensorflow: TensorFlow has loaded a gRPC of its own, and with {malloc} preloaded "
            "psgrad cannot be kept apart from it"
        )
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("psgrad._core")
    finally:
        sys.setdlopenflags(flags)
