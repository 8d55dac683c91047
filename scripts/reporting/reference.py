"""Compare the numbers and settings of a report with those of another report, such as the instructor's.

Every report writes its numbers to report.json. `report.py --reference` reads the file of another report. Numbers are
compared if the same row of the same table completed in both reports.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from reporting.metrics import Cell, format_number
from reporting.render import plural
from reporting.runs import ReportedRun
from reporting.tables import Table, TableRow, setting_differences, traits
from shared.errors import WorkshopError, one_line
from shared.json_files import read_checked, write_json

NUMBERS_FILE = "report.json"
SCHEMA: Literal[1] = 1
WAY_OUT = "give the folder of a report that scripts/report.py of this repository has written"


class Number(BaseModel):
    """The number of a cell. A mean also has its standard deviation and the number of runs."""

    value: float
    spread: float | None = None
    count: int = 1


class RowNumbers(BaseModel):
    """A row. settings: the settings that its numbers depend on. values: column -> number."""

    label: str
    experiment: str
    job_id: str
    status: str
    settings: dict[str, str]
    values: dict[str, Number]


class ReportNumbers(BaseModel):
    """The whole file: the rows of each table."""

    version: Literal[1] = Field(alias="schema")
    tables: dict[str, list[RowNumbers]]


def write_numbers(tables: list[Table], output: Path) -> None:
    """Write report.json, so that others can compare their reports with this one. Raises OSError if writing fails."""
    numbers = ReportNumbers(
        schema=SCHEMA,
        tables={
            table.definition.id: [row_numbers(row, table) for row in table.rows if row.run]
            for table in tables
            if table.has_runs
        },
    )
    write_json(output / NUMBERS_FILE, numbers.model_dump(by_alias=True, exclude_defaults=True))


def row_numbers(row: TableRow, table: Table) -> RowNumbers:
    run = row.repeats[0]
    return RowNumbers(
        label=row.label,
        experiment=row.experiment,
        job_id=run.job_id,
        status=run.status,
        settings=defining_settings(run),
        values={
            column: Number(value=cell.number, spread=cell.spread, count=cell.count)
            for column, cell in zip(table.definition.columns, row.cells, strict=True)
            if cell.number is not None and math.isfinite(cell.number)
        },
    )


def defining_settings(run: ReportedRun) -> dict[str, str]:
    """Return the settings that the numbers of a run depend on, the most important ones first."""
    record = run.record
    counts = {"ranks": record.world_size, "nodes": len(record.nodes) or None, "CPU cores": record.hardware.cpus}
    found = traits(run) | {name: str(count) for name, count in counts.items() if count is not None}
    first = ["hardware", *counts, "precision", "data size", "model_name"]
    return {name: found[name] for name in dict.fromkeys([*first, *found]) if name in found}


def read_reference(given: Path, output: Path) -> dict[str, list[RowNumbers]]:
    """Read the tables of a report. given: the report's folder or its report.json.

    Raises WorkshopError (exit code 2) if the file is missing, is damaged or would be overwritten by this report.
    """
    path = given / NUMBERS_FILE if given.is_dir() else given
    if os.path.realpath(path) == os.path.realpath(output / NUMBERS_FILE):
        raise WorkshopError(given, "is the folder that this report is written to", "give another folder with -o")
    return read_checked(path, ReportNumbers, f"{NUMBERS_FILE} of schema {SCHEMA}", WAY_OUT).tables


def compare(tables: list[Table], reference: dict[str, list[RowNumbers]], given: Path) -> str:
    """Add the differences to the cells, and remarks to the rows. Returns a line for the summary."""
    numbers = rows = 0
    for table in tables:
        theirs = {entry.label: entry for entry in reference.get(table.definition.id, [])}
        for row in table.rows:
            entry = theirs.get(row.label)
            if row.run and entry and row.run.completed and entry.status == "completed":
                numbers += compare_row(table, row, entry)
                rows += 1
            elif row.run and entry:
                row.remarks.append(f"the reference (job {entry.job_id}): {entry.status}; this run: {row.run.status}")
    of_reference = plural(sum(map(len, reference.values())), "row")
    return one_line(
        f"Against the reference {given}: {plural(numbers, 'number')} compared, in {rows} of its {of_reference}."
    )


def compare_row(table: Table, row: TableRow, entry: RowNumbers) -> int:
    """Compare the numbers and the settings of a row. Returns the number of compared numbers."""
    if differ := setting_differences(defining_settings(row.repeats[0]), entry.settings):
        row.remarks.append(f"differs from the reference: {'; '.join(differ)}")
    compared = 0
    for i, (column, header) in enumerate(zip(table.definition.columns, table.definition.headers, strict=True)):
        if column in entry.values and row.cells[i].number is not None:
            versus = describe_difference(row.cells[i], entry.values[column].value, points=header.endswith("(%)"))
            row.cells[i] = replace(row.cells[i], versus=versus)
            compared += 1
    return compared


def describe_difference(own: Cell, reference: float, points: bool) -> str:
    """Return a text such as "+3.2 % of 412". points: give the difference in percentage points."""
    distance = (own.number or 0) - reference
    if distance == 0:
        return "equal"
    if points:
        return f"{distance:+.1f} points from {format_number(reference)}"
    if reference == 0:
        return f"reference {format_number(reference)}"
    return f"{100 * distance / abs(reference):+.1f} % of {format_number(reference)}"
