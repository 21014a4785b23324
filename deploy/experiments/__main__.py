"""See run.sh."""

from .main import main

raise SystemExit(main())
