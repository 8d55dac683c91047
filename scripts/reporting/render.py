"""A table as Markdown, as CSV, and all of them as one HTML page that needs nothing else.

Names, ids and reasons come from files that anybody may have written: they are shown, and do nothing where they are.
"""

import base64
import csv
import hashlib
import html
import io
import re
from pathlib import Path

from reporting.tables import Row, Table

GENERATOR = '<meta name="generator" content="scripts/report.py">'
SHOWN_LABELS = 5
STYLE = """
:root { color-scheme: light dark; --line: #ccc; --soft: #f3f3f1; --quiet: #555; --bad: #a30000 }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #2a2a2a; --quiet: #bbb; --bad: #ff9a8f } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin: 3rem 0 0 } nav ul { columns: 22rem 3; padding-left: 1.2rem }
p { max-width: 50rem } .question { font-style: italic; margin-top: 0.2rem }
.note, .remarks { color: var(--quiet); font-size: 0.875rem } .remarks { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 0.875rem }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.7rem; text-align: left; vertical-align: bottom }
td.number, th.number { text-align: right }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums } thead th { background: var(--soft) }
tbody th { font-weight: 600; white-space: nowrap } .bad { color: var(--bad); font-weight: 600 }
td.empty { background: var(--soft) }
figure { margin: 1.5rem 0 0 } img { max-width: 100%; height: auto; background: white }
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'"
ACTS_IN_MARKDOWN = re.compile(r"[\\`|<\[]")
ACTS_IN_A_SHEET = ("=", "+", "-", "@", "\t", "\r")


def lines_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and body of a table as text, metrics as rows where it is transposed."""
    first = [[row.label, row.jobs, row.status] for row in table.rows]
    if not table.transpose:
        body = [head + [cell.text for cell in row.cells] for head, row in zip(first, table.rows, strict=True)]
        return ["", "Job", "Status", *table.headers], body
    heads = [f"{label} (job {job}, {status})" if job else f"{label} ({status})" for label, job, status in first]
    body = []
    for i, name in enumerate(table.headers):
        cells = [row.cells[i] for row in table.rows]
        body.append([name, *(cell.text for cell in cells), "; ".join(dict.fromkeys(c.note for c in cells if c.note))])
    return ["Metric", *heads, "Note"], body


def remark_lines(table: Table) -> list[str]:
    """Remarks and the reasons of empty cells, each with the rows to which it applies."""
    rows: dict[str, list[str]] = {}
    for row in table.rows:
        if not row.run:
            continue
        reasons = {} if table.transpose else empty_cells(table, row)  # there a note stands beside the value
        for remark in [*row.remarks, *(f"{names}: {reason}" for reason, names in reasons.items())]:
            rows.setdefault(remark, []).append(f"{row.label} (job {row.run.job_id})")
    return [f"{listed(labels)}: {remark}" for remark, labels in rows.items()]


def listed(labels: list[str]) -> str:
    more = len(labels) - SHOWN_LABELS
    return ", ".join(labels[:SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")


def empty_cells(table: Table, row: Row) -> dict[str, str]:
    """Reason -> the columns that are empty for it."""
    reasons: dict[str, list[str]] = {}
    for name, cell in zip(table.headers, row.cells, strict=True):
        if cell.value is None:
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


def markdown(table: Table, images: list[Path]) -> str:
    parts = [f"# {in_markdown(table.title)}", table.question, grid(*lines_of(table))]
    if table.note:
        parts.append(table.note)
    if remarks := remark_lines(table):
        parts.append("\n".join(f"- {in_markdown(line)}" for line in remarks))
    parts += [f"![{image.stem}]({image.name})" for image in images]
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


def page(tables: list[Table], images: dict[str, list[Path]], title: str, summary: str) -> str:
    """The whole report. images: table name -> its plots, which are put into the page."""
    filled = [table for table in tables if table.has_runs]
    links = "".join(f'<li><a href="#{escape(table.name)}">{escape(table.title)}</a></li>' for table in filled)
    waiting = "".join(
        f"<li>{escape(table.title)}: {', '.join(f'<code>{escape(row.experiment)}</code>' for row in table.rows)}</li>"
        for table in tables
        if not table.has_runs
    )
    sections = "".join(section(table, images.get(table.name, [])) for table in filled)
    rest = f"<h2>Tables without a run</h2><ul>{waiting}</ul>" if waiting else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n{GENERATOR}\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(summary)}</p>\n<nav><ul>{links}</ul></nav>\n{sections}{rest}\n</html>\n"
    )


def section(table: Table, images: list[Path]) -> str:
    parts = [f'<h2 id="{escape(table.name)}">{escape(table.title)}</h2>']
    parts += [f'<p class="question">{escape(table.question)}</p>', html_table(table)]
    if table.note:
        parts.append(f'<p class="note">{escape(table.note)}</p>')
    if remarks := remark_lines(table):
        parts.append(f'<ul class="remarks">{"".join(f"<li>{escape(line)}</li>" for line in remarks)}</ul>')
    for image in images:
        data = base64.b64encode(image.read_bytes()).decode("ascii")
        parts.append(f'<figure><img alt="{escape(image.stem)}" src="data:image/png;base64,{data}"></figure>')
    return "\n".join(parts) + "\n"


def html_table(table: Table) -> str:
    header, body = lines_of(table)
    numbers = [any(starts_as_number(line[i]) for line in body) and header[i] != "Job" for i in range(len(header))]
    head = "".join(
        f"<th{' class=number' if n else ''}>{escape(name)}</th>" for n, name in zip(numbers, header, strict=True)
    )
    rows = "".join(f"<tr>{''.join(html_cells(line, header, numbers))}</tr>" for line in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def html_cells(line: list[str], header: list[str], numbers: list[bool]) -> list[str]:
    cells = [f"<th>{escape(line[0])}</th>"]
    for text, name, number in zip(line[1:], header[1:], numbers[1:], strict=True):
        kind = ""
        if name == "Status" and text not in ("completed", "running", "not run yet"):
            kind = "bad"
        elif not text and name not in ("Note", "Job"):
            kind = "empty"
        elif number:
            kind = "number"
        cells.append(f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>")
    return cells


def starts_as_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] == "-"


def escape(text: str) -> str:
    return html.escape(plain(text))
