"""A table as Markdown, as CSV, and as text for the terminal; reporting/page.py makes the HTML page.

Names, ids and reasons come from files that anybody may have written: they are shown, and do nothing where they are.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from reporting.metrics import decimals, shown
from reporting.runs import Run
from reporting.tables import Row, Table

SHOWN_LABELS = 5
SHOWN_PACKAGES = ["torch", "transformers", "deepspeed"]
ACTS_IN_MARKDOWN = re.compile(r"[\\`|<\[]")
ESCAPED = r"\]"  # the end of an image's text
ACTS_IN_A_SHEET = ("=", "+", "-", "@", "\t", "\r")


def cell_texts(table: Table) -> list[list[str]]:
    """The cells of each row as text, with decimals that agree within a column."""
    places = [
        decimals((row.cells[i] for row in table.rows), percent=name.endswith("(%)"))
        for i, name in enumerate(table.headers)
    ]
    return [[cell.with_decimals(n) for cell, n in zip(row.cells, places, strict=True)] for row in table.rows]


def lines_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and body of a table as text, metrics as rows where it is transposed."""
    first = [[row.label, row.jobs, row.status] for row in table.rows]
    if not table.transpose:
        body = [head + texts for head, texts in zip(first, cell_texts(table), strict=True)]
        return ["", "Job", "Status", *table.headers], body
    heads = [f"{label} (job {job}, {status})" if job else f"{label} ({status})" for label, job, status in first]
    rows = cell_texts(table)
    body = [[name, *(texts[i] for texts in rows), note_of(table, i)] for i, name in enumerate(table.headers)]
    return ["Metric", *heads, "Note"], body


def note_of(table: Table, column: int) -> str:
    """The notes of a column's cells, each once."""
    notes = dict.fromkeys(row.cells[column].note for row in table.rows)
    return "; ".join(filter(None, notes))


def empty_columns(table: Table) -> dict[str, str]:
    """Header -> the reasons, of each column in which no row has a value."""
    rows = [row for row in table.rows if row.run]
    found = {}
    for i, name in enumerate(table.headers):
        cells = [row.cells[i] for row in rows]
        if all(cell.value is None for cell in cells):
            found[name] = listed(list(dict.fromkeys(cell.note for cell in cells)), "; ")
    return found


def seen_on(table: Table) -> str:
    """Hardware, versions and GPU-hours of the table's runs, in one line."""
    runs = list({id(run): run for row in table.rows for run in row.repeats}.values())
    parts = [f"Hardware: {counted([hardware_of(run) for run in runs])}"]
    for name in SHOWN_PACKAGES:
        versions = [run.record.versions.get(name) or "" for run in runs]
        if any(versions):
            parts.append(f"{name} {counted([version or 'not recorded' for version in versions])}")
    return " · ".join([*parts, f"GPU-hours: {hours_of(runs)}"])


def hardware_of(run: Run) -> str:
    hardware = run.record.hardware
    cores = f" ({hardware.cpus} cores)" if hardware.cpus else ""
    return hardware.gpu or (f"{hardware.cpu}{cores}, no GPU" if hardware.cpu else "not recorded")


def hours_of(runs: list[Run]) -> str:
    """Sum of the GPU-hours that are known, and of how many runs they are not, with the reasons."""
    found = [run.gpu_hours() for run in runs]
    hours = [number for number, _ in found if number is not None]
    reasons = [why for number, why in found if number is None]
    known = f"{shown(sum(hours))} in {in_words(len(hours), 'run')}"
    if not reasons:
        return known
    return f"{known}, no value for {len(reasons)} ({counted(reasons)})" if hours else f"no value ({counted(reasons)})"


def counted(texts: list[str]) -> str:
    """Each text once, with the number of runs behind it where there are several."""
    counts = Counter(texts)
    if len(counts) == 1:
        return texts[0]
    return listed([f"{text} ({in_words(count, 'run')})" for text, count in counts.most_common()], "; ")


def in_words(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remark_lines(table: Table) -> list[str]:
    """Remarks and the reasons of empty cells, each with the rows to which it applies."""
    return [
        f"{listed([f'{row.label} (job {row.run.job_id})' for row in rows if row.run])}: {remark}"
        for remark, rows in remarks_of(table).items()
    ]


def remarks_of(table: Table, left_out: Collection[str] = ()) -> dict[str, list[Row]]:
    """Remark, or the reason of empty cells -> the rows to which it applies. left_out: columns that are not shown."""
    found: dict[str, list[Row]] = {}
    for row in table.rows:
        if not row.run:
            continue
        reasons = {} if table.transpose else empty_cells(table, row, left_out)  # there a note stands beside the value
        for remark in [*row.remarks, *(f"{names}: {reason}" for reason, names in reasons.items())]:
            found.setdefault(remark, []).append(row)
    return found


def listed(texts: list[str], between: str = ", ") -> str:
    more = len(texts) - SHOWN_LABELS
    return between.join(texts[:SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")


def empty_cells(table: Table, row: Row, left_out: Collection[str] = ()) -> dict[str, str]:
    """Reason -> the columns that are empty for it, but for those left out."""
    reasons: dict[str, list[str]] = {}
    for name, cell in zip(table.headers, row.cells, strict=True):
        if cell.value is None and name not in left_out:
            reasons.setdefault(cell.note, []).append(name)
    return {reason: ", ".join(names) for reason, names in reasons.items()}


def plain(text: str) -> str:
    """The text with an escape for each character that cannot be seen: line ends, terminal codes, half surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def in_markdown(text: str) -> str:
    """The text as it stands: no code, cell, tag, link or image begins in it."""
    return ACTS_IN_MARKDOWN.sub(r"\\\g<0>", plain(text))


def in_sheet(value: object) -> object:
    """A number as it is. A text that a spreadsheet would take for a formula gets a ' before it."""
    if not isinstance(value, str):
        return value
    return ("'" if value.startswith(ACTS_IN_A_SHEET) else "") + plain(value)


def grid(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table that is readable as it stands."""
    cells = [[in_markdown(text) for text in line] for line in [header, *body]]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    rows = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(f"| {row} |" for row in rows)


def markdown(table: Table, images: list[tuple[Path, str]]) -> str:
    """images: files of the plots, each with what is seen in it."""
    parts = [f"# {in_markdown(table.title)}", table.question, in_markdown(seen_on(table)), grid(*lines_of(table))]
    if table.note:
        parts.append(table.note)
    if remarks := remark_lines(table):
        parts.append("\n".join(f"- {in_markdown(line)}" for line in remarks))
    parts += [f"![{in_markdown(alt).replace(']', ESCAPED)}]({image.name})" for image, alt in images]
    return "\n\n".join(parts) + "\n"


def comma_separated(table: Table) -> str:
    """One line per row with all digits, whether transposed or not; a spread and a count behind the mean of repeats."""
    spread = any(cell.spread is not None for row in table.rows for cell in row.cells)
    head = ["row", "experiment", "job_id", "status"]
    for name in table.headers:
        head += [name, f"{name} standard deviation", f"{name} runs"] if spread else [name]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*head, "remarks"])
    for row in table.rows:
        line: list[object] = [row.label, row.experiment, row.jobs, row.status]
        for cell in row.cells:
            line.append(cell.value)
            if spread:
                line += [cell.spread, 0 if cell.value is None else cell.count]
        reasons = [f"{names}: {reason}" for reason, names in empty_cells(table, row).items()]
        writer.writerow(map(in_sheet, [*line, "; ".join([*row.remarks, *reasons])]))
    return out.getvalue()
