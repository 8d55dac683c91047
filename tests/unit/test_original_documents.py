"""The five documents from which the workshop grew: every line of them has a place, which says what they said.

tests/data/original_documents.csv has a row for each part of a document and each place that takes it up. `words`, with
semicolons between, stand in that section: they are what the part is about. The letters are those of
docs/original-documents.md.
"""

import csv
import re
from itertools import groupby

import pytest

from helpers import REPOSITORY

LINES = {"D": 1330, "D0": 193, "F": 1346, "F0": 245, "Z": 173}
with (REPOSITORY / "tests" / "data" / "original_documents.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


def section(place: str) -> str:
    """Text of ``page.md#anchor`` up to the next heading of its level, or of the whole page."""
    name, _, anchor = place.partition("#")
    in_docs = REPOSITORY / "docs" / name
    text = (in_docs if in_docs.exists() else REPOSITORY / name).read_text(encoding="utf-8")
    if not anchor:
        return text
    parts = re.split(r"^(#+) (.*)$", text, flags=re.MULTILINE)  # before, level, heading, text, level, heading, text...
    headings = list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for _, heading, _ in headings]
    first = anchors.index(anchor)
    found = headings[first][2]
    for level, _, content in headings[first + 1 :]:
        if len(level) <= len(headings[first][0]):
            break
        found += content
    return found


def test_every_line_of_the_documents_has_a_place():
    parts = {(row["document"], int(row["first"]), int(row["last"])) for row in ROWS}
    for document, of_document in groupby(sorted(parts), key=lambda part: part[0]):
        end = 0
        for _, first, last in of_document:
            assert first == end + 1, f"{document} {first}-{last}"
            end = last
        assert end == LINES[document]
    assert {document for document, *_ in parts} == LINES.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['document']}-{row['first']}-{row['about']}")
def test_a_place_holds_what_the_documents_said(row):
    text = section(row["place"]).lower()
    for words in filter(None, row["words"].split(";")):
        assert words.lower() in text, f"{row['document']} {row['first']}-{row['last']}: {row['place']}: {words}"
