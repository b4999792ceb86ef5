"""`python -m scalerl` is the command `scalerl`."""

from scalerl.cli.main import main

raise SystemExit(main())
