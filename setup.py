"""The part of the metadata that depends on where the repository is: change REPOSITORY, and nothing else.

README.md has relative links, which a code host follows; here they are made absolute, for a package index.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/OWNER/scalerl"
"""A placeholder. `OWNER/scalerl` is written nowhere else."""


def absolute(readme: str) -> str:
    """Return the README with links to files of the repository in place of relative ones."""
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https?://|#)", rf"\1{raw}", readme)
    return re.sub(r"(\]\()(?!https?://|#)", rf"\1{REPOSITORY}/blob/main/", readme)


setup(
    long_description=absolute((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
)
