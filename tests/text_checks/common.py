"""Shared parts of the text checks: the texts, the parsed modules of scripts/, and the form of a finding."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import PAGES, REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SCRIPTS.rglob("*.py"))}
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
# A section's page begins with its number and its title
SECTIONS = {page: match for page, text in TEXTS.items() if (match := re.match(r"# (\d+)\. (.*)", text))}


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def read(name: str | Path) -> str:
    """Text of a file, empty if there is no such file."""
    path = REPOSITORY / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def after(text: str, heading: str) -> str:
    """Text below a heading of level 2, up to the next one. Empty without this heading."""
    return f"\n{text}".partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def differences(page: str, source: str, shown: dict, stated: dict) -> Iterator[str]:
    """Yield each entry for which a page shows another value than its source states."""
    for key in sorted(shown.keys() | stated.keys()):
        says, should_say = shown.get(key, "nothing"), stated.get(key, "nothing")
        if says != should_say:
            yield f"{page}: {key}: says {says}, {source} says {should_say}"
