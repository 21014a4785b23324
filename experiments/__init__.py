"""Comparing the modes (compare/), and the experiments that people learn parallel SGD from, each with its published
figures beside ours: a file here is one of them, with its page in templates/, or something that they share (accuracy,
hosts, lab, page). What both need is in shared/.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
