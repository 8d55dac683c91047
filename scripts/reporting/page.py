"""All tables, plots and runs as one HTML page that needs nothing else: no script, no request, no second file.

Sections and runs are folded. A link to a folded one opens it, as its target stands inside; on paper all is unfolded.
Names, ids and reasons come from files that anybody may have written: each goes through `escape`.
"""

import base64
import hashlib
import html
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from reporting.metrics import Cell
from reporting.record import Record
from reporting.render import cell_texts, empty_columns, hardware_of, in_words, note_of, plain, remarks_of, seen_on
from reporting.runs import Run
from reporting.tables import Row, Table

GENERATOR = '<meta name="generator" content="scripts/report.py">'
TITLE = "Results of the workshop"
MOST_LINES = 12  # of a list, which then tells how many more there are
MOST_SETTINGS = 100
JOB = re.compile(r"\bjob ([A-Za-z0-9._-]*[A-Za-z0-9])")  # as remarks name it
IN_ORDER = ("completed", "running")  # statuses about which nothing is wrong
STYLE = """
:root { color-scheme: light; --page: #fff; --ink: #1a1a1a; --quiet: #555; --soft: #f2f2ef; --line: #c8c8c4;
  --bad: #a30000; --good: #00592f; --apart: #7a4a00; --link: #0b4f9e }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --page: #161616; --ink: #ececec; --quiet: #b8b8b8; --soft: #262626; --line: #555;
    --bad: #ff9a8f; --good: #7fdcae; --apart: #ffc46b; --link: #9cc8ff }
}
* { box-sizing: border-box }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 78rem; margin: 0 auto; padding: 1rem; color: var(--ink);
  background: var(--page); overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0 } h2 { font-size: 1.2rem; margin: 1.5rem 0 0.3rem }
p, dl, ul { max-width: 56rem; margin: 0.4rem 0 } ul { padding-left: 1.3rem } nav ul { columns: 18rem 3 }
a { color: var(--link); text-underline-offset: 0.15em }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
:target { scroll-margin-top: 3.5rem }
.quiet, .facts { color: var(--quiet); font-size: 0.875rem } .bad { color: var(--bad); font-weight: 600 }
.within { color: var(--good) } .outside { color: var(--apart); font-weight: 600 }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap }
details { border-top: 1px solid var(--line) } details details { margin-left: 0.5rem }
details > div { padding: 0 0 1rem 1.1rem }
summary { cursor: pointer; padding: 0.45rem 0 } summary h2 { display: inline; margin: 0 }
.question { display: block; margin-left: 1.1rem; color: var(--quiet) }
.wide { overflow-x: auto; position: relative; margin: 0.6rem 0 }
table { border-collapse: separate; border-spacing: 0; font-size: 0.875rem; overflow-wrap: normal }
th, td { border-bottom: 1px solid var(--line); padding: 0.35rem 0.5rem; text-align: left; vertical-align: top }
thead th { background: var(--soft); vertical-align: bottom }
tbody th { font-weight: 600; max-width: 17rem; overflow-wrap: break-word; background: var(--page) }
tbody th, thead th:first-child { position: sticky; left: 0 }
td.number, th.number { text-align: right } td.number { white-space: nowrap; font-variant-numeric: tabular-nums }
td.number a { color: inherit; text-decoration: underline dotted var(--line) } td.number a:hover { color: var(--link) }
td.number small { display: block } td.empty { background: var(--soft) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
figure { margin: 0.6rem 0 0 }
img { max-width: 100%; height: auto; background: #fff; padding: 0.4rem; border-radius: 0.3rem }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: 0.15rem 1rem } dt { font-weight: 600 } dd { margin: 0 }
@media (max-width: 40rem) {
  details > div { padding-left: 0 } dl { grid-template-columns: 1fr } dd { margin: 0 0 0.3rem 0.8rem }
  tbody th { max-width: 8.5rem } th, td { padding: 0.3rem 0.4rem }
}
@media print {
  body { max-width: none; font-size: 0.8rem } .wide { overflow: visible } table { font-size: 0.65rem }
  tbody th, thead th:first-child { position: static }
  details::details-content { content-visibility: visible; display: block; height: auto }
  nav { display: none } tr, figure, dl { break-inside: avoid }
}
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'"


def page(tables: list[Table], runs: list[Run], images: dict[str, list[tuple[Path, str]]], summary: list[str]) -> str:
    """The whole report.

    runs: all of them, oldest first, which gives them their numbers. images: table name -> its plots, each with what is
    seen in it; they are put into the page. summary: what a row shows, then what the comparison with a reference found.
    """
    links = Links(runs)
    filled = [table for table in tables if table.has_runs]
    contents = "".join(f'<li><a href="#{escape(table.name)}">{escape(table.title)}</a></li>' for table in filled)
    sections = [section(table, images.get(table.name, []), links, table is filled[0]) for table in filled]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"{GENERATOR}\n<title>{TITLE}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{TITLE}</h1>\n<p>{escape(summary[0])} #1, #2 and so on are the runs in the order in which they "
        f"started, those without a run record first; each number of a table is a link to its run.</p></header>\n"
        f'<main>\n{overview(filled, runs, links, summary[1:])}\n<nav aria-label="Tables"><h2>Tables</h2><ul>{contents}'
        f'<li><a href="#each-run">Each run: command, commit, knobs, log</a></li></ul></nav>\n'
        f"{''.join(sections)}{all_of(runs, links)}{without_runs(tables)}</main>\n</body>\n</html>\n"
    )


class Links:
    """The runs' numbers, in the order in which they started, and links to what the page tells about each."""

    def __init__(self, runs: list[Run]):
        self.numbers = {id(run): number for number, run in enumerate(runs, 1)}
        times = Counter(run.job_id for run in runs)  # jobs of two folders may have the same id
        self.by_id = {run.job_id: run for run in runs if times[run.job_id] == 1}

    def anchor(self, run: Run) -> str:
        return f"run-{self.numbers[id(run)]}"

    def to(self, run: Run) -> str:
        """#5, and its job id for those who hear the page or point at it."""
        job = escape(shortened(run.job_id))
        return (
            f'<a href="#{self.anchor(run)}" title="job {job}">#{self.numbers[id(run)]}'
            f'<span class="unseen"> (job {job})</span></a>'
        )

    def to_all(self, runs: list[Run]) -> str:
        shown = [self.to(run) for run in runs[:MOST_LINES]]
        return ", ".join(shown) + more_than(len(runs))

    def in_text(self, text: str) -> str:
        """The text, escaped, in which the id of a job is a link to its run."""
        parts = JOB.split(text)
        for i in range(1, len(parts), 2):
            run = self.by_id.get(parts[i])
            parts[i] = f"job {self.to(run) if run else escape(parts[i])}"
        parts[::2] = [escape(part) for part in parts[::2]]
        return "".join(parts)

    def from_number(self, text: str, run: Run) -> str:
        """A number that leads to its run; the tabulator key stops once in a row, at its #5."""
        return f'<a href="#{self.anchor(run)}" tabindex="-1">{escape(text)}</a>'


def overview(tables: list[Table], runs: list[Run], links: Links, compared_lines: list[str]) -> str:
    """What ran, what failed, what does not compare."""
    completed = [run for run in runs if run.completed]
    damaged = [run for run in completed if run.problems]
    experiments = in_words(len({run.experiment for run in runs}), "experiment")
    lines = [f"<li>{in_words(len(runs), 'run')} of {experiments}; {len(completed):,} completed.</li>"]
    recorded = [run for run in runs if run.has_record]
    if recorded and all(run.record.hardware.gpus == 0 for run in recorded):
        lines.append("<li>No run had a GPU: where a table says GPU, a rank is a process on the CPU.</li>")
    for status in sorted({run.status for run in runs} - {"completed"}):
        lines.append(noted(status, [run for run in runs if run.status == status], links))
    if damaged:
        lines.append(noted("completed, incomplete", damaged, links))
    lines.append(apart(tables, links))
    lines += [f"<li>{escape(shortened(line))}</li>" for line in compared_lines]
    return f"<section><h2>Overview</h2>\n<ul>{''.join(lines)}</ul></section>"


def apart(tables: list[Table], links: Links) -> str:
    """The line of the overview on rows that do not compare with the others of their table."""
    found: dict[tuple[int, str], str] = {}  # the table of all runs has the rows of the others once more
    for table in tables:
        for row in table.rows:
            if row.run and not row.compares:
                where = f'{escape(row.label)} in <a href="#{escape(table.name)}">{escape(table.title)}</a>'
                why = escape(shortened(remarks_apart(row)))
                found.setdefault((id(row.run), why), f"{links.to(row.run)} {where}: {why}")
    head = f"{in_words(len(found), 'row')}, left out of lines over GPUs and of scatter plots"
    each = items(list(found.values())[:MOST_LINES], len(found))
    return f'<li><span class="bad">does not compare</span>: {head}{each}</li>' if found else ""


def noted(status: str, runs: list[Run], links: Links) -> str:
    """A line of the overview: how many runs ended so, and what is known of each."""
    each = []
    for run in runs[:MOST_LINES]:
        why = next(filter(None, [run.status_note, *run.problems]), "").replace(f"{run.folder}/", "")
        each.append(f"{links.to(run)} {escape(run.experiment)}{': ' if why else ''}{escape(shortened(why))}")
    word = f'<span class="bad">{escape(status)}</span>' if status not in IN_ORDER else escape(status)
    return f"<li>{word}: {in_words(len(runs), 'run')}{items(each, len(runs))}</li>"


def remarks_apart(row: Row) -> str:
    """In what a row does not compare, as its remarks say it."""
    own = [remark for remark in row.remarks if "does not compare: " in remark and "is not shown" not in remark]
    return "; ".join(remark.removeprefix("completed: ").removeprefix("does not compare: ") for remark in own)


def section(table: Table, images: list[tuple[Path, str]], links: Links, first: bool) -> str:
    """A table with its plots, folded but for the first one."""
    left_out = empty_columns(table)
    parts = [f'<p class="quiet">{escape(seen_on(table))}</p>', html_table(table, links, left_out)]
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        why = shortened(from_folder(reason, table.rows))
        parts.append(f'<p class="quiet">Left out, as empty: {escape(", ".join(names))} ({escape(why)}).</p>')
    if table.note:
        parts.append(f'<p class="quiet">{escape(table.note)}</p>')
    remarks = remarks_of(table, left_out)
    each = []
    for remark, rows in list(remarks.items())[:MOST_LINES]:
        named = [f"{escape(row.label)} {links.to(row.run)}" for row in rows[:MOST_LINES] if row.run]
        each.append(f"{', '.join(named)}{more_than(len(rows))}: {links.in_text(shortened(from_folder(remark, rows)))}")
    if each:
        parts.append(f'<div class="quiet">{items(each, len(remarks))}</div>')
    if images:
        parts.append(f'<div class="plots">{"".join(figure(path, alt) for path, alt in images)}</div>')
    question = f'<span class="question">{escape(table.question)}</span>'
    return folded(f"<h2>{escape(table.title)}</h2>{question}", table.name, "\n".join(parts), opened=first)


def from_folder(text: str, rows: list[Row]) -> str:
    """Paths as seen from the runs' own folders, which stand in their own entries."""
    for row in rows:
        if row.run and row.run.folder.name:  # the folder . has none
            text = text.replace(f"{row.run.folder}/", "")
    return text


def figure(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></figure>'


def html_table(table: Table, links: Links, left_out: Iterable[str]) -> str:
    shown = [i for i, name in enumerate(table.headers) if name not in left_out]
    texts = cell_texts(table)
    fill = across if table.transpose else downward
    head, body = fill(table, links, shown, texts)
    label = f"{escape(table.title)}, table"
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table aria-label="{escape(table.title)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def downward(table: Table, links: Links, shown: list[int], texts: list[list[str]]) -> tuple[str, str]:
    """Header and body with a row for each run."""
    numbers = [i for i in shown if any(row.cells[i].number is not None for row in table.rows)]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Experiment", "Run", "Status"))
    head += "".join(
        f'<th scope="col"{" class=number" if i in numbers else ""}>{escape(table.headers[i])}</th>' for i in shown
    )
    body = []
    for row, line in zip(table.rows, texts, strict=True):
        cells = "".join(html_cell(row, i, line[i], table.columns[i], links) for i in shown)
        body.append(
            f'<tr><th scope="row">{breakable(row.label)}</th><td>{links.to_all(row.repeats)}</td>'
            f"<td{of_status(row)}>{escape(shortened(row.status))}</td>{cells}</tr>"
        )
    return head, "".join(body)


def across(table: Table, links: Links, shown: list[int], texts: list[list[str]]) -> tuple[str, str]:
    """Header and body with a row for each metric."""
    head = '<th scope="col">Metric</th>'
    for row in table.rows:
        status = f"<span{of_status(row)}>({escape(row.status)})</span>"
        head += f'<th scope="col" class="number">{escape(row.label)} {links.to_all(row.repeats)} {status}</th>'
    head += '<th scope="col">Note</th>'
    body = []
    for i in shown:
        cells = "".join(
            html_cell(row, i, line[i], table.columns[i], links) for row, line in zip(table.rows, texts, strict=True)
        )
        note = escape(shortened(note_of(table, i)))
        body.append(f'<tr><th scope="row">{escape(table.headers[i])}</th>{cells}<td>{note}</td></tr>')
    return head, "".join(body)


def of_status(row: Row) -> str:
    return "" if row.status in IN_ORDER or not row.run else ' class="bad"'


def html_cell(row: Row, number: int, text: str, column: str, links: Links) -> str:
    cell = row.cells[number]
    if cell.value is None or not row.run:
        return '<td class="empty"></td>'
    if cell.number is None:
        return f"<td>{escape(shortened(text))}</td>"
    # a `reference` column holds the number of another run than the row's
    number_of_run = escape(text) if column.startswith("reference.") else links.from_number(text, row.run)
    return f'<td class="number">{number_of_run}{compared(cell)}</td>'


def compared(cell: Cell) -> str:
    """What the cell says beside a reference report, in a word and a sign, not by colour alone."""
    if not cell.compared:
        return ""
    kind, sign = ("within", "✓") if cell.compared.within else ("outside", "✗")
    return f'<small class="{kind}">{sign} {escape(cell.compared.text)}, {kind}</small>'


def all_of(runs: list[Run], links: Links) -> str:
    """Each run with what a reader needs to trust its numbers, or to repeat it."""
    logs = logs_in({run.folder for run in runs})
    each = []
    for run in runs:
        status = "" if run.status in IN_ORDER else ' class="bad"'
        name = f"#{links.numbers[id(run)]} {escape(shortened(run.experiment))}"
        facts = "".join(
            f"<dt>{name}</dt><dd>{value}</dd>"
            for name, value in facts_of(run, logs[run.folder, f"_{run.job_id}.out"])
            if value
        )
        title = f"{name}: <span{status}>{escape(run.status)}</span>"
        each.append(folded(title, links.anchor(run), f"<dl>{facts}</dl>"))
    title = '<h2>Each run</h2><span class="question">Which command, commit, knobs and log stand behind a number?</span>'
    return folded(title, "each-run", "".join(each))


def logs_in(folders: Iterable[Path]) -> dict[tuple[Path, str], list[str]]:
    """(folder, end of a name from a _ on) -> the job logs there; each folder is read once, whatever runs it holds."""
    found: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.glob("log/*_*.out")):
            for at in (i for i, character in enumerate(path.name) if character == "_"):
                found[folder, path.name[at:]].append(str(path))
    return found


def facts_of(run: Run, logs: list[str]) -> list[tuple[str, str]]:
    """Name and value, as HTML; empty where there is none."""
    record = run.record
    commit = escape(record.git.commit or "") + (" with uncommitted changes" if record.git.dirty else "")
    hours, why = run.gpu_hours()
    started, finished = [time.isoformat(" ", "seconds") if time else "" for time in (record.started, record.finished)]
    ranks = "" if record.world_size is None else in_words(record.world_size, "rank")
    nodes = some([escape(shortened(node)) for node in record.nodes], ", ")
    status = f"{run.status}{': ' if run.status_note else ''}{run.status_note}"
    missing = [escape(shortened(f"{name}: {reason}")) for name, reason in record.missing.items()]
    return [
        ("Job", escape(run.job_id)),
        ("Status", escape(shortened(status))),
        ("Problems", items([escape(shortened(problem)) for problem in run.problems[:MOST_LINES]], len(run.problems))),
        ("Notes", items([escape(shortened(note)) for note in run.notes[:MOST_LINES]], len(run.notes))),
        ("Started", started),
        ("Finished", finished),
        ("GPU-hours", f"{hours:.4g}" if hours is not None else escape(f"none: {why}")),
        ("Hardware", escape(shortened(hardware_of(run)))),
        ("Nodes", "; ".join(filter(None, [nodes, ranks]))),
        ("Commit", commit),
        ("Command of a rank", code(shlex.join(record.command))),
        ("Versions", some([escape(f"{name} {version}") for name, version in record.versions.items() if version], ", ")),
        ("Knobs", knobs_html(record)),
        ("Settings", settings_html(record)),
        ("Not measured", items(missing[:MOST_SETTINGS], len(missing))),
        ("Record", code(str(run.path)) if run.path else "none"),
        ("Log", some([code(log) for log in logs], " ") or "not found"),
    ]


def knobs_html(record: Record) -> str:
    """What is in effect, and what was requested where it differs."""
    each = []
    for name, knob in record.knobs:
        if knob.effective is not None or knob.requested is not None:
            requested = "" if knob.requested == knob.effective else f" (requested: {knob.requested})"
            each.append(escape(shortened(f"{name}: {knob.effective}{requested}")))
    return some(each, "; ")


def settings_html(record: Record) -> str:
    given = [f"{name}={value}" for name, value in record.settings if value is not None]
    return some([code(setting) for setting in given], " ")


def without_runs(tables: list[Table]) -> str:
    waiting = [table for table in tables if table.rows and not table.has_runs]
    each = [
        f"{escape(table.title)}: {', '.join(f'<code>{escape(row.experiment)}</code>' for row in table.rows)}"
        for table in waiting
    ]
    title = f'<h2>Not run yet</h2><span class="question">{in_words(len(waiting), "table")} without a run</span>'
    return folded(title, "not-run-yet", items(each, len(each))) if waiting else ""


def folded(title: str, anchor: str, content: str, opened: bool = False) -> str:
    """The anchor stands in the folded part: a browser unfolds what holds the target of a link."""
    return (
        f"<details{' open' if opened else ''}><summary>{title}</summary>\n"
        f'<div id="{escape(anchor)}">\n{content}\n</div></details>\n'
    )


def items(each: list[str], count: int) -> str:
    """A list; `count` tells how many there are, where only the first ones are given."""
    rest = f"<li>and {count - len(each):,} more</li>" if count > len(each) else ""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in each)}{rest}</ul>" if each else ""


def some(each: list[str], between: str) -> str:
    return between.join(each[:MOST_SETTINGS]) + more_than(len(each), MOST_SETTINGS)


def more_than(count: int, shown: int = MOST_LINES) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def code(text: str) -> str:
    return f"<code>{escape(shortened(text))}</code>" if text else ""


def shortened(text: str, most: int = 2000) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def breakable(text: str) -> str:
    """A path may break behind each of its folders and words."""
    return escape(text).replace("/", "/<wbr>").replace("_", "_<wbr>") if "/" in text else escape(text)


def escape(text: str) -> str:
    return html.escape(plain(text))
