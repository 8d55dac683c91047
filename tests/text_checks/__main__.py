"""Compare the texts of the repository with each other: pages, commands, scripts, pins.

    .venv/bin/python tests/text_checks        # part of make lint

The command lists all findings at once. Each finding names its file, the problem and the solution. The exit code is 1
if there are findings.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from text_checks import (
    commands,
    documents,
    experiments,
    imports,
    libraries,
    links,
    pages,
    repository,
    security,
    sizes,
    variables,
)
from text_checks.common import TEXTS, TREES

CHECKS = (pages, sizes, links, commands, experiments, libraries, documents, repository, imports, security, variables)


def main() -> int:
    number = 0
    for check in CHECKS:
        for finding in check.findings():
            print(finding)
            number += 1
    print(f"{len(CHECKS)} text checks, {len(TEXTS)} pages, {len(TREES)} modules of scripts/: {number} findings")
    return min(number, 1)


if __name__ == "__main__":
    sys.exit(main())
