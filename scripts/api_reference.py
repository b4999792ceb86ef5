"""Build the reference of the public names from their docstrings: HTML under FOLDER.

    python scripts/api_reference.py build/api

`make docs` installs what it needs (pdoc) and runs it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pdoc

MODULES = ("scalerl", "scalerl.curve")


def main() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            # What is imported when first asked for is not yet among the module's own names, where pdoc looks.
            setattr(module, public, getattr(module, public))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")


if __name__ == "__main__":
    main()
