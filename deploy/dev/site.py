"""Builds the documentation as a site into build/site: `python -m deploy.dev.site MKDOCS`.

The pages lie as in the tree, so that links between docs/ and the files above it hold; a broken one fails the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/PAUSES.md")
# A word after the language of a block marks it for the tests of documented commands.
MARKED = re.compile(r"^( *```[a-z]+) .*", re.MULTILINE)


def main(mkdocs: str) -> int:
    build = Path("build/docs")
    shutil.rmtree(build, ignore_errors=True)
    shutil.copytree("docs", build / "docs")
    for page in PAGES:
        (build / page).parent.mkdir(exist_ok=True)
        shutil.copy(page, build / page)
    for copy in build.rglob("*.md"):
        copy.write_text(MARKED.sub(r"\1", copy.read_text()))
    return subprocess.call([mkdocs, "build", "--quiet", "--strict"], env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
