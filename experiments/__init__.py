"""The experiments that people learn parallel SGD from, each with its published figures beside ours.

A file here is an experiment, or something that several of them share. What running programs, reading their metrics and
drawing need is compare's.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# First: one of its modules may have the name of an installed package.
sys.path.insert(0, str(REPOSITORY / "experiments/compare"))
