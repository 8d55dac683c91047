"""Render all tables, plots and runs as one self-contained HTML page, from page.html and page.css in this folder.

Names, ids and reasons come from files that anybody may have written, so jinja2 escapes each of them.
"""

import base64
import hashlib
import re
import shlex
from pathlib import Path

import jinja2
from markupsafe import Markup

from reporting import render
from reporting.render import Plot
from reporting.runs import NO_JOB_SCRIPT, ReportedRun
from reporting.tables import Table, TableRow
from reporting.trainer_log import find_log
from shared.paths import workshop_version

HERE = Path(__file__).parent
GENERATOR = Markup('<meta name="generator" content="scripts/report.py">')
POLICY = "default-src 'none'; style-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'"
LONGEST_JOB_ID = 12  # characters of an id that a table shows whole
SHORTEST_END = 3  # characters of a longer id that a table shows at least


def render_page(tables: list[Table], runs: list[ReportedRun], plots: dict[str, list[Plot]], summary: list[str]) -> str:
    """Return the whole report as HTML.

    runs: all runs, oldest first. plots: table name -> its plots, which the page embeds.
    summary: a sentence that explains the rows, and one on the comparison with a reference.
    """
    style, policy = content_policy("page.css")
    filled = [table for table in tables if table.has_runs]
    # The number makes an id unique: jobs of two folders may have the same one
    anchors = {run: f"job-{run.job_id}-{number}" for number, run in enumerate(runs, 1)}
    environment = page_environment()
    environment.filters |= {
        "data_url": data_url,
        "shorten_paths": shorten_paths,
        "shell": shlex.join,
    }
    environment.globals |= vars(render) | {"list": list}
    return environment.get_template("page.html").render(
        policy=policy,
        generator=GENERATOR,
        title=page_title(runs),
        style=style,
        version=workshop_version(),
        summary=summary[0],
        compared=summary[1:],
        runs=runs,
        anchors=anchors,
        short_ids=short_job_ids(runs),
        listed=runs_by_status(runs),
        mismatched=mismatched_rows(filled),
        no_gpu=all(run.record.hardware.gpus == 0 for run in runs if run.has_record),
        no_job_script=NO_JOB_SCRIPT,
        good_statuses=("completed", "running"),
        filled=filled,
        waiting=[table for table in tables if table.rows and not table.has_runs],
        plots=plots,
        logs={run: find_log(run.folder, run.job_id) for run in runs},
    )


def content_policy(*files: str) -> tuple[Markup, Markup]:
    """Return the style sheets in these files as one, and the policy that allows only this style and no script."""
    style = Markup("".join((HERE / name).read_text(encoding="utf-8") for name in files))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return style, Markup(POLICY.format(digest))


def page_environment() -> jinja2.Environment:
    """Return the environment of the templates in this folder. It escapes values, and an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["allow_breaks"] = allow_breaks
    environment.globals["plural"] = render.plural
    return environment


def page_title(runs: list[ReportedRun]) -> str:
    """Return the heading. It names the experiment family, the folder below `experiments`, if all runs belong to one."""
    families = {run.experiment.partition("/")[0] for run in runs}
    return f"Results: {families.pop()}" if len(families) == 1 else "Results"


def short_job_ids(runs: list[ReportedRun]) -> dict[str, str]:
    """Map each job id to a text for the tables. A long id is shortened to the last words that no other id ends with."""
    ids = {run.job_id for run in runs}
    found = {}
    for job_id in ids:
        ends = [job_id[match.end() :] for match in re.finditer("[-_.]", job_id)]
        unique = [end for end in ends if len(end) >= SHORTEST_END and sum(each.endswith(end) for each in ids) == 1]
        found[job_id] = f"…{unique[-1]}" if unique and len(job_id) > LONGEST_JOB_ID else job_id
    return found


def runs_by_status(runs: list[ReportedRun]) -> list[tuple[str, list[ReportedRun]]]:
    """Group the runs by status. Completed runs are left out, except those with problems, which come last."""
    statuses = sorted({run.status for run in runs} - {"completed"})
    found = [(status, [run for run in runs if run.status == status]) for status in statuses]
    damaged = [run for run in runs if run.completed and run.problems]
    return found + ([("completed, incomplete", damaged)] if damaged else [])


def mismatched_rows(tables: list[Table]) -> list[tuple[Table, TableRow]]:
    """Return the rows that cannot be compared with the others. A run with the same mismatches is returned only once."""
    found: dict[tuple, tuple[Table, TableRow]] = {}
    for table in tables:
        for row in table.rows:
            if row.run and row.mismatches:
                found.setdefault((row.run, *row.mismatches), (table, row))
    return list(found.values())


def shorten_paths(text: str, run: ReportedRun | None) -> str:
    """Make paths in the text relative to the run's folder."""
    return text.replace(f"{run.folder}/", "") if run else text


def data_url(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"


def allow_breaks(text: str) -> Markup:
    """Let a browser break the line after each slash, underscore and hyphen of a path."""
    if "/" not in text:
        return Markup.escape(text)
    return Markup(re.sub("([/_-])", r"\1<wbr>", str(Markup.escape(text))))
