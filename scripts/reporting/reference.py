"""One's own report beside another one, such as the instructor's: its numbers, and the settings that differ.

Every report leaves its numbers in report.json; report.py --reference reads that of another one. A number is compared
where the same row of the same table completed on both sides.
"""

import math
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from errors import WorkshopError, one_line
from json_files import write_json
from reporting.metrics import Cell, shown
from reporting.render import in_words, listed
from reporting.runs import Run
from reporting.tables import Row, Table, traits

NAME = "report.json"
WAY_OUT = "give the folder of a report that scripts/report.py of this repository has written"


class Number(BaseModel):
    value: float


class Entry(BaseModel):
    """A row of a table that shows a run. values: column -> its number, where it has one."""

    label: str
    experiment: str
    job_id: str
    status: str
    settings: dict[str, str]
    values: dict[str, Number]


class Report(BaseModel):
    """A report.json. tables: name -> its rows."""

    version: Literal[1] = Field(alias="schema")
    tables: dict[str, list[Entry]]


def write_numbers(tables: list[Table], output: Path) -> None:
    """Write report.json, by which others compare their report with this one. OSError when it cannot be written."""
    rows = {table.name: [content(row, table) for row in table.rows if row.run] for table in tables if table.has_runs}
    write_json(output / NAME, {"schema": 1, "tables": rows})


def content(row: Row, table: Table) -> dict:
    """The fields of an Entry; a mean has its standard deviation and the number of runs as well."""
    run = row.repeats[0]
    values = {}
    for column, cell in zip(table.columns, row.cells, strict=True):
        if cell.number is not None and math.isfinite(cell.number):
            repeats = {"spread": cell.spread, "count": cell.count} if cell.spread is not None else {}
            values[column] = {"value": cell.number, **repeats}
    return {
        "label": row.label,
        "experiment": row.experiment,
        "job_id": run.job_id,
        "status": run.status,
        "gpus": run.record.hardware.gpus,
        "settings": defining_settings(run),
        "values": values,
    }


def defining_settings(run: Run) -> dict[str, str]:
    """What must be equal for two runs of an experiment to give the same numbers, what explains most first."""
    record = run.record
    counts = {"ranks": record.world_size, "nodes": len(record.nodes) or None, "CPU cores": record.hardware.cpus}
    found = traits(run) | {name: str(count) for name, count in counts.items() if count is not None}
    first = ["hardware", *counts, "precision", "data size", "model_name"]
    return {name: found[name] for name in dict.fromkeys([*first, *found]) if name in found}


def read_reference(given: Path, output: Path) -> Report:
    """The report.json in a report's folder, or at a path itself. One line and exit code 2 when there is none."""
    path = given / NAME if given.is_dir() else given
    if os.path.realpath(path) == os.path.realpath(output / NAME):
        raise WorkshopError(given, "is the folder that this report is written to", "give another folder with -o")
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", WAY_OUT) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise WorkshopError(path, f"is no {NAME} of a report ({where}: {first['msg']})", WAY_OUT) from error


def compare(tables: list[Table], reference: Report, given: Path) -> list[str]:
    """Put the other numbers beside those of the tables, and remarks into their rows. Returns lines for the summary."""
    numbers = 0
    apart: dict[str, list[str]] = defaultdict(list)  # why it was not compared -> rows
    for table in tables:
        entries = {(entry.label, entry.experiment): entry for entry in reference.tables.get(table.name, [])}
        for row in table.rows:
            entry = entries.pop((row.label, row.experiment), None)
            place = f"{row.label} in {table.name}"
            if not row.run or not entry:
                apart["only here"] += [place] if row.run else []
                apart["only in the reference"] += [place] if entry else []
            elif not row.run.completed or entry.status != "completed":
                row.remarks.append(f"the reference (job {entry.job_id}): {entry.status}; this run: {row.run.status}")
                apart["not completed on both sides"].append(place)
            else:
                numbers += put_beside(table, row, entry)
        apart["only in the reference"] += [f"{label} in {table.name}" for label, _ in entries]
    rows = in_words(sum(map(len, apart.values())), "row")
    lines = [f"Against the reference {given}: {in_words(numbers, 'number')} compared, {rows} not."]
    lines += [f"Not compared, {why}: {listed(places)}." for why, places in apart.items() if places]
    return [one_line(line) for line in lines]


def put_beside(table: Table, row: Row, entry: Entry) -> int:
    """The numbers of a row's entry beside its own, and the settings that differ. Returns how many there are."""
    own = defining_settings(row.repeats[0])
    names = [name for name in own | entry.settings if own.get(name) != entry.settings.get(name)]
    differ = [f"{name} {own.get(name, 'unset')} instead of {entry.settings.get(name, 'unset')}" for name in names]
    if differ:
        row.remarks.append(f"differs from the reference: {'; '.join(differ)}")
    compared = 0
    for i, (column, header) in enumerate(zip(table.columns, table.headers, strict=True)):
        if column in entry.values and row.cells[i].number is not None:
            beside = in_relation(row.cells[i], entry.values[column].value, points=header.endswith("(%)"))
            row.cells[i] = replace(row.cells[i], beside=beside)
            compared += 1
    return compared


def in_relation(own: Cell, reference: float, points: bool) -> str:
    """Such as "+3.2 % of 412"; a percentage is so many points from the other one."""
    distance = (own.number or 0) - reference
    if distance == 0:
        return "equal"
    if points:
        return f"{distance:+.1f} points from {shown(reference)}"
    if reference == 0:
        return f"reference {shown(reference)}"
    return f"{100 * distance / abs(reference):+.1f} % of {shown(reference)}"
