"""See deploy/experiments.sh."""

from .main import main

raise SystemExit(main())
