"""Check that each line of the five original documents has a place in the workshop: a file and a heading.

tests/data/original_documents.csv has a row for each part of a document and each place that covers the part.
docs/original-documents.md explains the letters.
"""

import csv
from collections.abc import Iterator

from helpers import REPOSITORY
from text_checks.common import differences, read
from text_checks.links import missing_target

PLACES = "tests/data/original_documents.csv"
LINES = {"D": 1330, "D0": 193, "F": 1346, "F0": 245, "Z": 173}


def findings() -> Iterator[str]:
    rows = list(csv.DictReader(read(PLACES).splitlines()))
    ends = dict.fromkeys(LINES, 0)  # document -> number n: lines 1 to n all have a place
    for document, first, last in sorted((row["document"], int(row["first"]), int(row["last"])) for row in rows):
        if first == ends.setdefault(document, 0) + 1:
            ends[document] = last
    shown, stated = (
        {f"{key}: lines with a place": f"1 to {end}" for key, end in each.items()} for each in (ends, LINES)
    )
    yield from differences(PLACES, "the document", shown, stated)
    for row in rows:
        name, _, anchor = row["place"].partition("#")
        file = REPOSITORY / name
        if lacks := missing_target(file if file.exists() else REPOSITORY / "docs" / name, anchor):
            part = f"{row['document']} {row['first']}-{row['last']}"
            yield f"{PLACES}: {part}: says {row['place']}, but there is {lacks}; write the place of this part"
