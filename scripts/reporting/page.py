"""All tables, plots and runs as one HTML page that needs nothing else, from page.html and page.css next to this file.

Names, ids and reasons come from files that anybody may have written: jinja2 escapes each of them.
"""

import base64
import hashlib
import re
import shlex
from collections import Counter
from pathlib import Path

import jinja2
from markupsafe import Markup

from reporting import render
from reporting.runs import Run
from reporting.tables import Row, Table
from reporting.trainer_log import log_of
from shared.paths import workshop_version

HERE = Path(__file__).parent
GENERATOR = Markup('<meta name="generator" content="scripts/report.py">')
POLICY = "default-src 'none'; style-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'"
JOB = re.compile(r"(?<=\bjob )([A-Za-z0-9._-]*[A-Za-z0-9])")  # as remarks name it
FLAG = re.compile(r"--\w+")  # a browser breaks lines after the dashes


def page(tables: list[Table], runs: list[Run], images: dict[str, list[tuple[Path, str]]], summary: list[str]) -> str:
    """The whole report.

    runs: all runs, oldest first. images: table name -> its plots, each with a description; the page embeds them.
    summary: what a row shows, then what the comparison with a reference found.
    """
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    filled = [table for table in tables if table.has_runs]
    anchors = anchors_of(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "data_url": data_url,
        "allow_breaks": allow_breaks,
        "shorten_paths": shorten_paths,
        "shell": shlex.join,
        "link_jobs": lambda text: link_jobs(text, anchors),
    }
    environment.globals |= vars(render) | {"list": list}
    return environment.get_template("page.html").render(
        policy=Markup(POLICY.format(digest)),
        generator=GENERATOR,
        style=style,
        version=workshop_version(),
        summary=summary[0],
        compared=summary[1:],
        runs=runs,
        anchors=anchors,
        ended=runs_by_status(runs),
        mismatched=mismatched_rows(filled),
        no_gpu=all(run.record.hardware.gpus == 0 for run in runs if run.has_record),
        in_order=("completed", "running"),  # statuses of runs without an error
        filled=filled,
        waiting=[table for table in tables if table.rows and not table.has_runs],
        images=images,
        logs={run: log_of(run.folder, run.job_id) for run in runs},
    )


def anchors_of(runs: list[Run]) -> dict[Run, str]:
    """The id of the part of the page that is about a run; jobs of two folders may have the same id."""
    taken: Counter[str] = Counter()
    anchors = {}
    for run in runs:
        taken[run.job_id] += 1
        again = f"-{taken[run.job_id]}" if taken[run.job_id] > 1 else ""
        anchors[run] = f"job-{run.job_id}{again}"
    return anchors


def link_jobs(text: str, anchors: dict[Run, str]) -> Markup:
    """Escape the text, and link the id of a job to its run unless two runs have this id. A flag is not broken."""
    known = Counter(run.job_id for run in anchors)
    parts = []
    for part in JOB.split(text):
        link = Markup('<a href="#job-{0}">{0}</a>').format(part)
        escaped = str(Markup.escape(part))
        parts.append(link if known[part] == 1 else FLAG.sub(r'<span class="flag">\g<0></span>', escaped))
    return Markup("".join(parts))


def runs_by_status(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """Status -> its runs, without those that completed; the ones that completed with damaged logs come last."""
    statuses = sorted({run.status for run in runs} - {"completed"})
    found = [(status, [run for run in runs if run.status == status]) for status in statuses]
    damaged = [run for run in runs if run.completed and run.problems]
    return found + ([("completed, incomplete", damaged)] if damaged else [])


def mismatched_rows(tables: list[Table]) -> list[tuple[Table, Row]]:
    """The rows that do not compare. A run is listed once for equal mismatches: the table of all runs repeats it."""
    found: dict[tuple, tuple[Table, Row]] = {}
    for table in tables:
        for row in table.rows:
            if row.run and row.mismatches:
                found.setdefault((row.run, *row.mismatches), (table, row))
    return list(found.values())


def shorten_paths(text: str, run: Run | None) -> str:
    """Make paths relative to the run's own folder."""
    return text.replace(f"{run.folder}/", "") if run else text


def data_url(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode('ascii')}"


def allow_breaks(text: str) -> Markup:
    """Let a browser break a path after each folder and word."""
    if "/" not in text:
        return Markup.escape(text)
    return Markup.escape(text).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>"))
