"""Check that links of pages lead to existing files and headings, and that named sections and code exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import SECTIONS, TEXTS, read, relative_name


def missing_target(file: Path, anchor: str) -> str:
    """Return "no such file", "no such heading" (by GitHub's rules for anchors), or "" if the target exists."""
    if not file.exists():
        return "no such file"
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return "no such heading" if anchor and anchor not in anchors else ""


def findings() -> Iterator[str]:
    numbers = {page.name: match[1] for page, match in SECTIONS.items()}
    for page, text in TEXTS.items():
        for target, name, anchor in re.findall(r"\]\((?!https?://)(([^)\s#]*)#?([^)\s]*))\)", text):
            if lacks := missing_target(page.parent / name if name else page, anchor):
                yield f"{relative_name(page)}: links to {target}, but there is {lacks}; write the new name"
        for number, target in re.findall(r"\[(?:[Ss]ection )?(\d+)\]\(([\w./-]+\.md)", text):
            expected = numbers.get(Path(target).name, number)
            if number != expected:
                yield f"{relative_name(page)}: says [{number}]({target}), that page says section {expected}"
        for path, name in re.findall(r"`((?:benchmarks|exercises|scripts|tests)/[\w/.]+)::(\w+)`", text):
            if not re.search(rf"^ *(?:(?:def|class) {name}\b|{name}(?::.*)? = )", read(path), re.MULTILINE):
                yield f"{relative_name(page)}: names {path}::{name}, which does not exist; write the new name"
