"""How the compiled module is loaded, where another library has brought a gRPC of its own."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys


def _has_foreign_grpc() -> bool:
    """Whether symbols of a gRPC are visible to all libraries, as TensorFlow's are: ours would be bound to them."""
    return hasattr(ctypes.CDLL(None), "grpc_init")


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
