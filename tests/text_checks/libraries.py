"""Check that the libraries have the functions that docs/training-loop.md names."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import read, section_below

LIBRARIES = Path(sysconfig.get_path("purelib"))


def findings() -> Iterator[str]:
    """Check the functions that docs/training-loop.md names, below the heading of the list."""
    rows = section_below(read("docs/training-loop.md"), "Where to read it").split("\n- ")[1:]
    if not rows:
        yield "docs/training-loop.md: lists no functions below `## Where to read it`; write - `<file>`: `<function>`"
    for row in rows:
        file, *functions = re.findall(r"`(.+?)`", row)
        for function in functions:
            if f"def {function}(" not in read(LIBRARIES / file):
                yield f"docs/training-loop.md: says {function}, {file} has no such function; write its new name"
