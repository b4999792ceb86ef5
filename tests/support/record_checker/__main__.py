"""The checker as a command."""

import sys

from record_checker import check

faults = [f"{folder}: {fault}" for folder in sys.argv[1:] for fault in check(folder)]
print("\n".join(faults) or f"{len(sys.argv) - 1} sound")
raise SystemExit(bool(faults))
