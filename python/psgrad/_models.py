"""Several models in one script: each has a job of its own, on servers of its own.

psrun tells workers where these are by two variables: PS_SERVERS is "g=HOST:PORT,d=HOST:PORT", and PS_JOBS
"g=JOB/g,d=JOB/d".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_NAME = "[A-Za-z0-9_-]{1,64}"
_IN_FOLDERS = ("checkpoint_dir",)  # Flags of ps_server that name a folder: each model has one in it.
_IN_FILES = ("local_socket", "metrics_file", "trace_file")  # Those that name a file.
_RESTORED_BY_NAME = ("auto", "latest", "none")  # What --restore may be besides a folder.


def names_in(text: str) -> tuple[str, ...]:
    """The models of "g,d". ValueError, with what is wrong."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if re.fullmatch(_NAME, name) is None:
            raise ValueError(f"{name!r} is no name of a model: letters, digits, _ and -")
    if len(set(names)) < len(names):
        raise ValueError("a name comes twice")
    return names


def names_addresses(text: str) -> bool:
    """Whether this is an address for each of several models, and not one address."""
    return re.match(f"{_NAME}=", text) is not None


def written(by_name: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in by_name.items())


def read(text: str) -> dict[str, str]:
    """The values by name of "g=HOST:PORT,d=HOST:PORT". ValueError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if re.fullmatch(_NAME, name) is None or not value:
            raise ValueError(f"{part!r}: NAME=HOST:PORT is expected, separated by commas")
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value
    return found


def check_addresses(models: Sequence[str], server: str) -> dict[str, str]:
    """The address of each model. ValueError."""
    addresses = read(server) if names_addresses(server) else {}
    if set(addresses) != set(models):
        wanted = ",".join(f"{name}=HOST:PORT" for name in models)
        raise ValueError(f"an address for each of the models is expected, as in {wanted}")
    return addresses


def check_flags(models: Sequence[str], flags: Mapping[str, str]) -> None:
    """ValueError for flags of servers that do not go with several models."""
    for name, value in flags.items():
        model, dot, plain = name.rpartition(".")
        if dot and model not in models:
            raise ValueError(f"--{name}: there is no model {model}; --models has {', '.join(models) or 'none'}")
        if models and (plain in ("min_workers", "max_workers") or (plain == "budget" and value == "job")):
            raise ValueError(
                f"--{name}: with --models the number of workers is fixed, and each has its share of the samples: one "
                "chief cannot hand them out for all models"
            )


def job_of(job: str, model: str) -> str:
    return f"{job}/{model}"


def port_after(address: str, count: int) -> str:
    """The address with a port that is so much higher. Port 0, which stands for any, stays."""
    host, colon, port = address.rpartition(":")
    if not port.isdecimal() or int(port) == 0:  # What is no address, the server refuses.
        return address
    return f"{host}{colon}{int(port) + count}"


def flags_of(model: str, flags: Mapping[str, str], servers_before: int = 0) -> dict[str, str]:
    """The flags of this model's servers: those of all, or its own (--g.mode). Files have its name in theirs.

    servers_before: so many servers of other models have taken ports from that of --http_listen on.
    """
    shared = {name: value for name, value in flags.items() if "." not in name}
    for name in _IN_FOLDERS:
        if shared.get(name):
            shared[name] = os.path.join(shared[name], model)
    if shared.get("restore") and shared["restore"] not in _RESTORED_BY_NAME:
        shared["restore"] = os.path.join(shared["restore"], model)
    for name in _IN_FILES:
        if shared.get(name):
            stem, extension = os.path.splitext(shared[name])
            shared[name] = f"{stem}.{model}{extension}"
    if "http_listen" in shared:
        shared["http_listen"] = port_after(shared["http_listen"], servers_before)
    if "job" in shared:
        shared["job"] = job_of(shared["job"], model)
    own = {name.removeprefix(f"{model}."): value for name, value in flags.items() if name.startswith(f"{model}.")}
    return {**shared, **own}


def place_of(model: str | None, server: str | None, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """The address of a model's job, and the job's name, if it has been said. ValueError, naming the choices."""
    addresses = read(environment["PS_SERVERS"]) if environment.get("PS_SERVERS") else {}
    jobs = read(environment["PS_JOBS"]) if environment.get("PS_JOBS") else {}
    if server:
        return server, jobs.get(model or "", environment.get("PS_JOB"))
    if not addresses:
        if not environment.get("PS_SERVER"):
            raise ValueError("server: none was given, and $PS_SERVER is not set; psrun sets it, or server='HOST:PORT'")
        if model is not None:
            raise ValueError(
                f"name={model!r}: $PS_SERVER is a job of one model, which needs no name; psrun --models={model},… "
                "starts servers for each of several, or server='HOST:PORT' says where this one's are"
            )
        return environment["PS_SERVER"], environment.get("PS_JOB")
    choices = ", ".join(map(repr, addresses))
    if model is None:
        raise ValueError(f"name: there are several models (psrun --models), so it has to be said which: {choices}")
    if model not in addresses:
        raise ValueError(f"name={model!r}: there are no servers for it; psrun --models has {choices}")
    return addresses[model], jobs.get(model)
