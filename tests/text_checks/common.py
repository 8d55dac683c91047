"""Shared parts of the text checks: the pages, the parsed modules of scripts/, and the form of a finding."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import PAGES, REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SCRIPTS.rglob("*.py"))}
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
# The page of a section begins with the section's number and title
SECTIONS = {page: match for page, text in TEXTS.items() if (match := re.match(r"# (\d+)\. (.*)", text))}


def relative_name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def read(name: str | Path) -> str:
    """Text of a file; empty if the file does not exist."""
    path = REPOSITORY / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def section_below(text: str, heading: str) -> str:
    """Text between a heading of level 2 and the next one; empty without this heading."""
    return f"\n{text}".partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def differences(page: str, source: str, shown: dict, stated: dict) -> Iterator[str]:
    """Yield a finding for each entry whose value on the page differs from the value in the source."""
    for key in sorted(shown.keys() | stated.keys()):
        says, should_say = shown.get(key, "nothing"), stated.get(key, "nothing")
        if says != should_say:
            yield f"{page}: {key}: says {says}, {source} says {should_say}"
