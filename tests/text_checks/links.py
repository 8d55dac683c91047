"""Each link of a page leads to a file and a heading that exist, and shows the number of its section."""

import re
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import SECTIONS, TEXTS, name_of


def missing(file: Path, anchor: str) -> str:
    """Return what a place lacks, the file or the heading with this anchor (as GitHub makes them), or nothing."""
    if not file.exists():
        return "no such file"
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return "no such heading" if anchor and anchor not in anchors else ""


def findings() -> Iterator[str]:
    numbers = {page.name: match[1] for page, match in SECTIONS.items()}
    for page, text in TEXTS.items():
        for target, name, anchor in re.findall(r"\]\((?!https?://)(([^)\s#]*)#?([^)\s]*))\)", text):
            if lacks := missing(page.parent / name if name else page, anchor):
                yield f"{name_of(page)}: links to {target}, and there is {lacks}; write its new name"
        for number, target in re.findall(r"\[(?:[Ss]ection )?(\d+)\]\(([\w./-]+\.md)", text):
            expected = numbers.get(Path(target).name, number)
            if number != expected:
                yield f"{name_of(page)}: says [{number}]({target}), that page says section {expected}"
