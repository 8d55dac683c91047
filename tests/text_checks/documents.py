"""The five documents from which the workshop grew: each of their lines has a place, a file and a heading.

tests/data/original_documents.csv has a row for each part of a document and each place that takes it up. The letters are
those of docs/original-documents.md.
"""

import csv
from collections.abc import Iterator

from helpers import REPOSITORY
from text_checks.common import read
from text_checks.links import anchors

PLACES = "tests/data/original_documents.csv"
LINES = {"D": 1330, "D0": 193, "F": 1346, "F0": 245, "Z": 173}


def findings() -> Iterator[str]:
    rows = list(csv.DictReader(read(PLACES).splitlines()))
    for document, lines in LINES.items():
        parts = {(int(row["first"]), int(row["last"])) for row in rows if row["document"] == document}
        end = 0
        for first, last in [*sorted(parts), (lines + 1, lines)]:
            if first != end + 1:
                yield f"{PLACES}: {document}: goes from line {end} to line {first}; give each line one place"
            end = last
    for row in rows:
        name, _, anchor = row["place"].partition("#")
        file = next((path for path in (f"docs/{name}", name) if (REPOSITORY / path).is_file()), None)
        part = f"{PLACES}: {row['document']} {row['first']}-{row['last']}"
        if row["document"] not in LINES:
            yield f"{part}: there is no such document; the documents are {', '.join(LINES)}"
        if not file:
            yield f"{part}: says {name}, and there is no such file; write its new name"
        elif anchor and anchor not in anchors(read(file)):
            yield f"{part}: says {row['place']}, and {file} has no such heading; write the one with this part"
