"""Runs experiments; deploy/experiments.sh is the door."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from experiments.shared.machine import why_no_reports

    if why := why_no_reports():
        sys.exit(f"experiments: {why}")
    from experiments.main import main

    sys.exit(main())
