"""The colours of figures and page. A figure is drawn in light; the page replaces its colours by variables."""

from __future__ import annotations

# Every light colour is used under one name only, so that it can be told from its value which name it is.
LIGHT = {
    "surface": "#fdfdfe",
    "ink": "#1d2129",
    "quiet": "#667080",
    "grid": "#e2e6eb",
    "bsp": "#39424e",
    "ssp": "#0a6ebd",
    "asp": "#d4570a",
    "backup": "#0b8a5f",
    "local_sgd": "#7a4fd6",
    "easgd": "#b07d04",
    "other": "#b03a86",
    "compute": "#8fb3d4",
    "idle": "#c4d7e8",
    "push": "#2f9e8f",
    "wait": "#e0243a",
    "pull": "#e3b341",
}
DARK = {
    "surface": "#14171c",
    "ink": "#e9ecf1",
    "quiet": "#9aa5b4",
    "grid": "#2c323b",
    "bsp": "#cfd6e0",
    "ssp": "#5db4f5",
    "asp": "#ff8c42",
    "backup": "#3ccb97",
    "local_sgd": "#b69aff",
    "easgd": "#f2c749",
    "other": "#f08ac8",
    "compute": "#4d7ba6",
    "idle": "#2f4d69",
    "push": "#2fb3a2",
    "wait": "#ff4d5e",
    "pull": "#d9a92f",
}
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))


def family(mode: str) -> str:
    """The name of a mode's colour: modes of one kind share it."""
    name = {"sync": "bsp", "async": "asp"}.get(mode.partition(":")[0], mode.partition(":")[0])
    return name if name in LIGHT else "other"


def dash(mode: str, modes: list[str]) -> object:
    """How lines of a mode are dashed, which tells ssp:2 from ssp:8."""
    same = [each for each in modes if family(each) == family(mode)]
    return DASHES[same.index(mode) % len(DASHES)] if mode in same else DASHES[0]
