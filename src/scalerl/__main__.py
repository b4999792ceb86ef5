"""Run the command `scalerl` as `python -m scalerl`."""

from scalerl.cli.main import main

if __name__ == "__main__":  # spawned processes import this module too
    raise SystemExit(main())
