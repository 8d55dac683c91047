"""Check the length of the pages. Commands and tables count, blocks that `make pages` writes do not."""

import re
from collections.abc import Iterator

from text_checks.common import SECTIONS, TEXTS, read, relative_name

BLOCK = re.compile(r"\[\[\[cog.*?\[\[\[end\]\]\]", re.DOTALL)
SECTION = 1650  # words of a section with its exercise and quiz: 14 minutes of reading
BOX = 120  # words of a box, the lines of a section that begin with >
LIMITS = {
    "docs/": 49_000,  # without docs/instructor/
    "docs/instructor/": 5000,
    "README.md": 1200,
    "CHANGELOG.md": 800,
    "CONTRIBUTING.md": 1700,
    "AGENTS.md": 300,
    "the notes (say:) in experiments/agendas.yaml": 400,
}


def words(text: str) -> int:
    return len(BLOCK.sub("", text).split())


def findings() -> Iterator[str]:
    found = dict.fromkeys(LIMITS, 0)
    for page, text in TEXTS.items():
        name = relative_name(page)
        group = next((group for group in ("docs/instructor/", "docs/") if name.startswith(group)), name)
        if group in found:
            found[group] += words(text)
    notes = re.findall(r"^ +(?:- \{.*)?say: (.*(?:\n {8,}.*)*)", read("experiments/agendas.yaml"), re.MULTILINE)
    found["the notes (say:) in experiments/agendas.yaml"] = sum(map(words, notes))
    found |= {relative_name(page): words(TEXTS[page]) for page in SECTIONS}
    for name, number in found.items():
        limit = LIMITS.get(name, SECTION)
        if number > limit:
            yield f"{name}: has {number} words, the limit is {limit}; cut, or move to the page that owns the fact"
    for page in SECTIONS:
        number = words("".join(re.findall(r"^>(.*\n)", TEXTS[page], re.MULTILINE)))
        if number > BOX:
            yield f"{relative_name(page)}: its box has {number} words, the limit is {BOX}; cut"
        if not re.search(r"^\| Hands-on \| \d*[05] min, without reading \|$", TEXTS[page], re.MULTILINE):
            row = "| Hands-on | 20 min, without reading |"
            yield f"{relative_name(page)}: its head does not say how long its commands and exercise take; write {row}"
