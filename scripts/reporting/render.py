"""Render a table as Markdown, as CSV, or as text for the terminal. reporting/page.py renders the HTML page.

Names, ids and reasons come from files that anybody may have written, so this module escapes each of them.
"""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from reporting.metrics import METRICS, decimals, format_number
from reporting.runs import Missing, ReportedRun
from reporting.tables import Table, TableRow
from shared.errors import join_first, one_line

SHOWN_PACKAGES = ["torch", "transformers", "deepspeed"]
MARKDOWN_SPECIAL = re.compile(r"[\\`|<\[\]]")
FORMULA_STARTS = ("=", "+", "-", "@")


class Plot(NamedTuple):
    """A plot of a table, which the page embeds."""

    svg: bytes
    description: str


def cell_texts(table: Table) -> list[list[str]]:
    """Format the cells of each row. All numbers of a column get the same number of decimals."""
    places = [
        decimals((row.cells[i] for row in table.rows), percent=name.endswith("(%)"))
        for i, name in enumerate(table.definition.headers)
    ]
    return [[cell.with_decimals(n) for cell, n in zip(row.cells, places, strict=True)] for row in table.rows]


def table_lines(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the header and the body of a table as text. In a transposed table, metrics are rows.

    A transposed table has a column for notes if there are any.
    """
    texts = cell_texts(table)
    if not table.definition.transpose:
        body = [[row.label, row.jobs, row.status, *line] for row, line in zip(table.rows, texts, strict=True)]
        return ["", "Job", "Status", *table.definition.headers], body
    columns = [f"{row.label} ({f'job {row.jobs}, ' if row.jobs else ''}{row.status})" for row in table.rows]
    notes = [column_note(table, i) for i in range(len(table.definition.headers))]
    body = [[name, *(line[i] for line in texts), notes[i]] for i, name in enumerate(table.definition.headers)]
    if any(notes):
        return ["Metric", *columns, "Note"], body
    return ["Metric", *columns], [line[:-1] for line in body]


def column_note(table: Table, column: int) -> str:
    """Join the notes of a column's cells, without duplicates. A row's status says that it has no run."""
    return "; ".join(filter(None, dict.fromkeys(row.cells[column].note for row in table.rows if row.run)))


def empty_columns(table: Table) -> dict[str, str]:
    """Return the header of each column without any value, or with zeros only, with the reasons."""
    found = {}
    for i, name in enumerate(table.definition.headers):
        cells = [row.cells[i] for row in table.rows if row.run]
        if not any(cell.value for cell in cells):
            reasons = ["the value is 0" if cell.value == 0 else cell.note for cell in cells]
            found[name] = join_first(dict.fromkeys(reasons), "; ")
    return found


def table_notes(table: Table, left_out: Collection[str] = ()) -> str:
    """Join the table's note and the explanations of its columns. left_out: columns that are not shown."""
    columns = zip(table.definition.columns, table.definition.headers, strict=True)
    notes = [METRICS[name].about for name, header in columns if name in METRICS and header not in left_out]
    return " ".join(filter(None, [table.definition.note, *notes]))


def predictions(table: Table, columns: list[int]) -> dict[int, int]:
    """Map each of the columns that shows a measured number to the column with its prediction, if the table has both."""
    names = {table.definition.columns[i]: i for i in columns}
    pairs = {i: names.get(name.replace("held", "estimated")) for name, i in names.items() if name.startswith("held_")}
    return {measured: predicted for measured, predicted in pairs.items() if predicted is not None}


def hardware_line(table: Table) -> str:
    """Describe hardware, versions, GPU-hours and energy of the table's runs in one line."""
    runs = list(dict.fromkeys(run for row in table.rows for run in row.repeats))
    parts = [f"Hardware: {count_texts([describe_hardware(run) for run in runs])}"]
    for name in SHOWN_PACKAGES:
        versions = [run.record.versions.get(name, "") for run in runs]
        if any(versions):
            parts.append(f"{name} {count_texts([version or 'not recorded' for version in versions])}")
    return " · ".join([*parts, f"GPU-hours: {describe_gpu_hours(runs)}"])


def describe_hardware(run: ReportedRun) -> str:
    hardware = run.record.hardware
    cores = f" ({hardware.cpus} cores)" if hardware.cpus else ""
    return hardware.gpu or (f"{hardware.cpu}{cores}, no GPU" if hardware.cpu else "not recorded")


def describe_gpu_hours(runs: list[ReportedRun]) -> str:
    """Return the sum of the known GPU-hours, and the number of runs without a value, with the reasons.

    If the energy of a run is known, the sum of the known kWh follows.
    """
    found = [run.gpu_hours() for run in runs]
    reasons = [hours.reason for hours in found if isinstance(hours, Missing)]
    known = [hours for hours in found if not isinstance(hours, Missing)]
    if not known:
        return f"no value ({count_texts(reasons)})"
    lacking = f", no value for {len(reasons)} ({count_texts(reasons)})" if reasons else ""
    return f"{format_number(sum(known))} in {plural(len(known), 'run')}{lacking}{describe_energy(runs)}"


def describe_energy(runs: list[ReportedRun]) -> str:
    """Return the sum of the known kWh, with the number of runs if it is not known for all. Empty if none is known."""
    energy = [run.get("energy.kwh") for run in runs]
    known = [kwh for kwh in energy if not isinstance(kwh, Missing)]
    if not known:
        return ""
    share = f" ({len(known)} of {plural(len(runs), 'run')})" if len(known) < len(runs) else ""
    return f"; {format_number(sum(known))} kWh{share}"


def count_texts(texts: Collection[str]) -> str:
    """Join the different texts. If there are several, each is followed by the number of its runs."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return join_first([f"{text} ({plural(count, 'run')})" for text, count in counts.most_common()], "; ")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table_remarks(table: Table, left_out: Collection[str] = ()) -> dict[str, list[TableRow]]:
    """Map each remark to its rows. The reason for an empty cell is a remark, too.

    left_out: columns that are not shown.
    """
    found: dict[str, list[TableRow]] = defaultdict(list)
    for row in table.rows:
        # A transposed table has a column for notes, which already contains the reasons.
        reasons = [] if table.definition.transpose or not row.run else empty_cells(table, row, left_out)
        for remark in [*row.remarks, *reasons]:
            found[remark].append(row)
    return found


def empty_cells(table: Table, row: TableRow, left_out: Collection[str] = ()) -> list[str]:
    """List the row's empty columns by reason, except those in left_out."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, cell in zip(table.definition.headers, row.cells, strict=True):
        if cell.value is None and name not in left_out:
            reasons[cell.note].append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def escape_markdown(text: str) -> str:
    """Escape the characters that begin code, a cell, a tag, a link or an image."""
    return MARKDOWN_SPECIAL.sub(r"\\\g<0>", one_line(text))


def escape_formula(value: object) -> object:
    """Prefix a text with ' if a spreadsheet would evaluate it as a formula. Numbers are not changed."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def grid(header: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns, so that it is readable as plain text."""
    cells = [[escape_markdown(text) for text in line] for line in [header, *body]]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    rows = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(f"| {row} |" for row in rows)


def render_markdown(table: Table) -> str:
    """Render the Markdown page of a table, without its plots."""
    parts = [
        f"# {escape_markdown(table.definition.title)}",
        table.definition.question,
        escape_markdown(hardware_line(table)),
        grid(*table_lines(table)),
    ]
    lines = []
    for remark, rows in table_remarks(table).items():
        labels = join_first([f"{row.label} (job {row.run.job_id})" for row in rows if row.run])
        lines.append(f"- {escape_markdown(f'{labels}: {remark}')}")
    parts += [table_notes(table), "\n".join(lines)]
    return "\n\n".join(filter(None, parts)) + "\n"


def render_csv(table: Table) -> str:
    """Render a table as CSV: one line per row, with all digits, also for a transposed table.

    If any cell is a mean over runs, each metric also has a column for its standard deviation and one for the count.
    """
    spread = any(cell.spread is not None for row in table.rows for cell in row.cells)
    header = ["row", "experiment", "job_id", "status"]
    for name in table.definition.headers:
        header += [name, f"{name} standard deviation", f"{name} runs"] if spread else [name]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, "remarks"])
    for row in table.rows:
        line: list[object] = [row.label, row.experiment, row.jobs, row.status]
        for cell in row.cells:
            count = 0 if cell.value is None else cell.count
            line += [cell.value, cell.spread, count] if spread else [cell.value]
        line.append("; ".join([*row.remarks, *empty_cells(table, row)]))
        writer.writerow(map(escape_formula, line))
    return out.getvalue()
