"""Each link of a page leads to a file and a heading that exist, and shows the number of its section."""

import re
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import SECTIONS, TEXTS, name_of


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def findings() -> Iterator[str]:
    numbers = {page.name: match[1] for page, match in SECTIONS.items()}
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith(("http://", "https://")):
                yield from broken(page, target)
        for number, target in re.findall(r"\[(?:[Ss]ection )?(\d+)\]\(([\w./-]+\.md)", text):
            expected = numbers.get(Path(target).name, number)
            if number != expected:
                yield f"{name_of(page)}: says [{number}]({target}), that page says section {expected}"


def broken(page: Path, target: str) -> Iterator[str]:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        yield f"{name_of(page)}: links to {target}, and there is no such file; write its new name"
    elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
        yield f"{name_of(page)}: links to {target}, and no heading of that file has this anchor; write the heading's"
