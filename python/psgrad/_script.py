"""Runs a worker's script as `python SCRIPT.py …` and `python -m MODULE …` do: psrun starts its workers with this file.

There is one difference. A script that ends with a status, as by sys.exit(3), has failed; at the interpreter's exit
nothing tells of the status any more, so the worker leaves its job here.
"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType


def _run(arguments: list[str]) -> None:
    # What this imports must not come from this file's folder, which has a `torch` and a `data`.
    has_folder = not getattr(sys.flags, "safe_path", False)  # From Python 3.11 on: no folder is put on the path.
    if has_folder:
        del sys.path[0]
    import importlib.machinery
    import os
    import runpy

    is_module = arguments[0] == "-m"
    if has_folder:
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0])))
    sys.argv[:] = arguments
    main = sys.modules["__main__"] = ModuleType("__main__")
    _hide_these_frames()
    try:
        if is_module:
            del sys.argv[1]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
            return
        path = os.path.abspath(arguments[0])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__, __cached__=None)
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ended:
        life = sys.modules.get("psgrad.torch.life")
        if life is not None:
            life.leave_all(ended)
        raise


def _hide_these_frames() -> None:
    """A traceback begins in the script."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        before(kind, value.with_traceback(trace), trace)

    sys.excepthook = hook


if __name__ == "__main__":
    kept = sys.modules["__main__"]  # Else its names would be cleared.
    _run(sys.argv[1:])
