"""A table as Markdown, as CSV, and as text for the terminal; reporting/page.py makes the HTML page.

Names, ids and reasons come from files that anybody may have written, so this module escapes each of them.
"""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from reporting.metrics import decimals, format_number
from reporting.runs import Missing, Run
from reporting.tables import Row, Table
from shared.errors import one_line

SHOWN_LABELS = 5
SHOWN_PACKAGES = ["torch", "transformers", "deepspeed"]
ACTS_IN_MARKDOWN = re.compile(r"[\\`|<\[\]]")
ACTS_IN_A_SHEET = ("=", "+", "-", "@")


def cell_texts(table: Table) -> list[list[str]]:
    """The cells of each row as text, with decimals that agree within a column."""
    places = [
        decimals((row.cells[i] for row in table.rows), percent=name.endswith("(%)"))
        for i, name in enumerate(table.definition.headers)
    ]
    return [[cell.with_decimals(n) for cell, n in zip(row.cells, places, strict=True)] for row in table.rows]


def lines_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and body of a table as text, metrics as rows where it is transposed."""
    texts = cell_texts(table)
    if not table.definition.transpose:
        body = [[row.label, row.jobs, row.status, *line] for row, line in zip(table.rows, texts, strict=True)]
        return ["", "Job", "Status", *table.definition.headers], body
    heads = [f"{row.label} ({f'job {row.jobs}, ' if row.jobs else ''}{row.status})" for row in table.rows]
    body = [[name, *(line[i] for line in texts), note_of(table, i)] for i, name in enumerate(table.definition.headers)]
    return ["Metric", *heads, "Note"], body


def note_of(table: Table, column: int) -> str:
    """The notes of a column's cells, each once."""
    return "; ".join(filter(None, dict.fromkeys(row.cells[column].note for row in table.rows)))


def empty_columns(table: Table) -> dict[str, str]:
    """Header -> the reasons, of each column in which no row has a value."""
    found = {}
    for i, name in enumerate(table.definition.headers):
        cells = [row.cells[i] for row in table.rows if row.run]
        if all(cell.value is None for cell in cells):
            found[name] = join_first(dict.fromkeys(cell.note for cell in cells), "; ")
    return found


def hardware_line(table: Table) -> str:
    """Hardware, versions and GPU-hours of the table's runs, in one line."""
    runs = list(dict.fromkeys(run for row in table.rows for run in row.repeats))
    parts = [f"Hardware: {count_texts([hardware_of(run) for run in runs])}"]
    for name in SHOWN_PACKAGES:
        versions = [run.record.versions.get(name, "") for run in runs]
        if any(versions):
            parts.append(f"{name} {count_texts([version or 'not recorded' for version in versions])}")
    return " · ".join([*parts, f"GPU-hours: {hours_of(runs)}"])


def hardware_of(run: Run) -> str:
    hardware = run.record.hardware
    cores = f" ({hardware.cpus} cores)" if hardware.cpus else ""
    return hardware.gpu or (f"{hardware.cpu}{cores}, no GPU" if hardware.cpu else "not recorded")


def hours_of(runs: list[Run]) -> str:
    """Sum of the known GPU-hours, and the number of runs without a value, with the reasons."""
    found = [run.gpu_hours() for run in runs]
    reasons = [hours.reason for hours in found if isinstance(hours, Missing)]
    known = [hours for hours in found if not isinstance(hours, Missing)]
    if not known:
        return f"no value ({count_texts(reasons)})"
    lacking = f", no value for {len(reasons)} ({count_texts(reasons)})" if reasons else ""
    return f"{format_number(sum(known))} in {plural(len(known), 'run')}{lacking}"


def count_texts(texts: Collection[str]) -> str:
    """Join the texts, each once. Where texts differ, each gets the number of its runs."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return join_first([f"{text} ({plural(count, 'run')})" for text, count in counts.most_common()], "; ")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remarks_of(table: Table, left_out: Collection[str] = ()) -> dict[str, list[Row]]:
    """Remark, or the reason of empty cells -> the rows to which it applies. left_out: columns that are not shown."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        # where metrics are rows, the note is next to the value
        reasons = [] if table.definition.transpose or not row.run else empty_cells(table, row, left_out)
        for remark in [*row.remarks, *reasons]:
            found[remark].append(row)
    return found


def empty_cells(table: Table, row: Row, left_out: Collection[str] = ()) -> list[str]:
    """The columns that are empty, but for those left out, with each reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, cell in zip(table.definition.headers, row.cells, strict=True):
        if cell.value is None and name not in left_out:
            reasons[cell.note].append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def join_first(texts: Collection[str], between: str = ", ") -> str:
    more = len(texts) - SHOWN_LABELS
    return between.join(list(texts)[:SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")


def escape_markdown(text: str) -> str:
    """Escape what would begin code, a cell, a tag, a link or an image."""
    return ACTS_IN_MARKDOWN.sub(r"\\\g<0>", one_line(text))


def escape_formula(value: object) -> object:
    """Put a ' before a text that a spreadsheet would take for a formula. Numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(ACTS_IN_A_SHEET) else value


def grid(header: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns, which is readable as plain text."""
    cells = [[escape_markdown(text) for text in line] for line in [header, *body]]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    rows = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(f"| {row} |" for row in rows)


def markdown(table: Table, images: list[tuple[Path, str]]) -> str:
    """Return the page of a table. images: files of the plots, each with a description."""
    parts = [
        f"# {escape_markdown(table.definition.title)}",
        table.definition.question,
        escape_markdown(hardware_line(table)),
        grid(*lines_of(table)),
    ]
    lines = []
    for remark, rows in remarks_of(table).items():
        labels = join_first([f"{row.label} (job {row.run.job_id})" for row in rows if row.run])
        lines.append(f"- {escape_markdown(f'{labels}: {remark}')}")
    parts += [table.definition.note, "\n".join(lines)]
    parts += [f"![{escape_markdown(alt)}]({image.name})" for image, alt in images]
    return "\n\n".join(filter(None, parts)) + "\n"


def comma_separated(table: Table) -> str:
    """One line per row with all digits, whether transposed or not; a spread and a count behind the mean of repeats."""
    spread = any(cell.spread is not None for row in table.rows for cell in row.cells)
    head = ["row", "experiment", "job_id", "status"]
    for name in table.definition.headers:
        head += [name, f"{name} standard deviation", f"{name} runs"] if spread else [name]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*head, "remarks"])
    for row in table.rows:
        line: list[object] = [row.label, row.experiment, row.jobs, row.status]
        for cell in row.cells:
            count = 0 if cell.value is None else cell.count
            line += [cell.value, cell.spread, count] if spread else [cell.value]
        line.append("; ".join([*row.remarks, *empty_cells(table, row)]))
        writer.writerow(map(escape_formula, line))
    return out.getvalue()
