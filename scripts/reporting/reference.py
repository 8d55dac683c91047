"""One's own report beside a reference, such as the instructor's: the report.json of both, and the bands of tolerance.

Every report leaves its numbers in report.json; report.py --reference reads that of another one. A number is compared
where the same row of the same table completed on both sides. It is within its band or outside, and where the settings
differ as well, they are named as the possible cause.
"""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from errors import WorkshopError, one_line
from json_files import write_json
from reporting.metrics import METRICS, MOST_EPOCHS, Cell, Compared, shown
from reporting.record import Count, Typed, loss, read_typed
from reporting.render import in_words
from reporting.runs import Run
from reporting.tables import Row, Table, traits

NAME = "report.json"
REFERENCE_SCHEMA = 1
LARGEST_REFERENCE = 2**22  # bytes; a report of all experiments has some hundred thousand
SHOWN = 5  # names in a line
LONGEST_SETTING = 80  # characters of it in a remark


# --- the file


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a number that is not finite")
    return loss(value)


Finite = Annotated[float, AfterValidator(finite)]


class Number(Typed):
    """spread: sample standard deviation over `count` runs, None for a single one."""

    value: Finite
    spread: Finite | None = None
    count: Count = 1


class Entry(Typed):
    """A row of a table that shows a run. gpus: 0 on a CPU. values: column -> its number, where it has one."""

    label: str
    experiment: str
    job_id: str
    status: str
    gpus: Count | None
    settings: dict[str, str]
    values: dict[str, Number]


class Report(Typed):
    """A report.json. tables: name -> its rows."""

    version: Literal[1] = Field(alias="schema")
    tables: dict[str, Annotated[list[Entry], Field(fail_fast=True)]]


def write_numbers(tables: list[Table], output: Path) -> None:
    """Write report.json, by which others compare their report with this one. OSError when it cannot be written."""
    rows = {table.name: [content(row, table) for row in table.rows if row.run] for table in tables if table.has_runs}
    write_json(output / NAME, {"schema": REFERENCE_SCHEMA, "tables": rows})


def content(row: Row, table: Table) -> dict:
    """The fields of an Entry. Each text is cleaned: a file's name may hold what is no text."""
    assert row.run
    numbers = {column: cell for column, cell in zip(table.columns, row.cells, strict=True) if is_number(cell)}
    return {
        "label": one_line(row.label),
        "experiment": one_line(row.experiment),
        "job_id": one_line(row.run.job_id),
        "status": row.run.status,
        "gpus": row.run.record.hardware.gpus,
        "settings": defining_settings(row.run),
        "values": {column: number(cell) for column, cell in numbers.items()},
    }


def is_number(cell: Cell) -> bool:
    return cell.number is not None and math.isfinite(cell.number)


def number(cell: Cell) -> dict:
    repeats = {"spread": cell.spread, "count": cell.count} if cell.spread is not None else {}
    return {"value": cell.number, **repeats}


def defining_settings(run: Run) -> dict[str, str]:
    """What must be equal for two runs of an experiment to give the same numbers, what explains most first."""
    record = run.record
    counts = {"ranks": record.world_size, "nodes": len(record.nodes) or None, "CPU cores": record.hardware.cpus}
    found = traits(run) | {name: str(count) for name, count in counts.items() if count is not None}
    first = ["hardware", *counts, "precision", "data size", "model_name"]
    ordered = dict.fromkeys(name for name in [*first, *found] if name in found)
    return {one_line(name): one_line(found[name]) for name in ordered}


def read_reference(given: Path, output: Path) -> Report:
    """The report.json in a report's folder, or at a path itself. One line and exit code 2 when there is none."""
    way_out = "give the folder of a report that scripts/report.py of this repository has written"
    path = given / NAME if os.path.isdir(given) else given
    if os.path.realpath(path) == os.path.realpath(output / NAME):
        raise WorkshopError(given, "is the folder that this report is written to", "give another folder with -o")
    try:
        return read_typed(path, Report, f"{NAME} of schema {REFERENCE_SCHEMA}", LARGEST_REFERENCE)
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", way_out) from error
    except ValueError as error:
        raise WorkshopError(path, str(error), way_out) from error


# --- the bands


@dataclass(frozen=True)
class Band:
    """How far from the reference a number may be: in percent of it, or in points where it is itself a percentage.

    gpu: where both runs had GPUs. cpu: where one of them had none.
    """

    gpu: float
    cpu: float
    points: bool = False


EXACT = Band(0, 0)  # it follows from the settings
# The same data in the same order. Repeats on one CPU agree to the last digit; another order of sums moves a loss by
# 0.5 % (stage 0 beside the other stages, docs/instructor/answers.md)
LOSS = Band(2, 2)
# A peak is reached in every step. The rest is when the logger looked, and the driver's own part: 1.8 % between two
# repeats of seconds, jobs 103 and 107 of tests/data/runs
PEAK = Band(5, 5)
# A mean over time holds the loading, which waits for the file system: 17 % between those two
MEAN = Band(10, 25)
# Clocks, heat, the network and neighbours on the node change a speed by some percent. On a CPU other programs take
# their part of the cores: those two repeats differ by a factor of 2.7
SPEED = Band(10, 50)
SHORT = Band(25, 50)  # of seconds only, or with the start in it, which waits for files and compilers
SCORE = Band(5, 5, points=True)  # a share of 100 questions has a standard error of up to 5 points
PADDING = Band(1, 1, points=True)  # the seed sets the order of the questions, and so the padding

BANDS = {
    **dict.fromkeys(["gpus", "parameters", "num_layers", "batch_size", "train_size", "steps_per_epoch"], EXACT),
    **dict.fromkeys(["train_loss", "eval_loss", *(f"eval_loss_{n}" for n in range(1, MOST_EPOCHS + 1))], LOSS),
    **dict.fromkeys(["peak_gpu", "peak_cpu", "callback_gpu_mib", "callback_gpu_gib"], PEAK),
    **dict.fromkeys(["allocated_gpu", "reserved_gpu", "estimated_gpu", "estimated_cpu"], PEAK),
    **dict.fromkeys(["mean_gpu", "mean_gpu_gib", "mean_cpu"], MEAN),
    **dict.fromkeys(["runtime", "steps_per_second", "samples_per_second", "steady_samples_per_second"], SPEED),
    **dict.fromkeys(["tokens_per_second", "callback_samples_per_second", "mfu"], SPEED),
    **dict.fromkeys(["estimated_samples_per_second", "bus_bandwidth", "profiled_step"], SPEED),
    **dict.fromkeys(["eval_samples_per_second", "gpu_hours"], SHORT),
    **dict.fromkeys(["exact_match", "f1", "gpu_utilisation"], SCORE),
    "padding": PADDING,
}
# low_gpu is what was on the GPU at the logger's first sample, model is a text
NOT_COMPARED = {"low_gpu", "model"}
# Both numbers of a difference are compared themselves, and so is the whole of which these are parts
NOT_COMPARED |= {"difference_gpu", "difference_cpu", "difference_samples_per_second"}
NOT_COMPARED |= {name for name in METRICS if name.startswith("step_")}
NOT_COMPARED |= {name for name in METRICS if name.startswith("profiled_")} - {"profiled_step"}
OF_TWO_RUNS = 1.5  # times the band of the metric: both runs deviate, and deviations add as squares, to 1.4 times one
SPREADS = 3  # standard deviations of the reference's repeats that are always within
# A percentage that is computed from the ratio of two runs -> that ratio in percent: of a saving, what is left
RATIOS = {
    "saving": lambda value: 100 - value,
    "change": lambda value: 100 + value,
    "efficiency": lambda value: value,
    "weak_efficiency": lambda value: value,
}


def beside(column: str, own: Cell, reference: Number, on_cpu: bool) -> Compared | None:
    """How far a number is from the reference's, and whether that is within the band of its column."""
    relation, _, metric = column.rpartition(".")
    band = BANDS.get(metric)
    if band is None or own.number is None:
        return None
    percent = band.cpu if on_cpu else band.gpu
    base = reference.value
    if relation in RATIOS:
        base = RATIOS[relation](base)
    if relation not in ("", "reference"):
        percent *= OF_TWO_RUNS
    slack = percent if band.points else percent / 100 * abs(base)
    distance = own.number - reference.value
    within = abs(distance) <= max(slack, SPREADS * (reference.spread or 0))
    return Compared(distance_in_words(distance, reference.value, points=band.points or relation in RATIOS), within)


def distance_in_words(distance: float, base: float, points: bool) -> str:
    if distance == 0:
        return "equal"
    if points:
        return f"{distance:+.1f} points from {shown(base)}"
    share = 100 * distance / abs(base) if base else math.inf
    if not abs(share) < 1000:
        return f"reference {shown(base)}"
    return f"{share:+.{0 if abs(share) >= 9.95 else 1}f} % of {shown(base)}"


# --- comparing


@dataclass
class Outcome:
    """What the comparison has found, with the rows as (table, label)."""

    within: int = 0
    outside: int = 0
    rows_outside: list[tuple[str, str]] = field(default_factory=list)
    apart: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # why it was not compared -> rows
    on_cpu: bool = False

    def leave_out(self, why: str, table: str, label: str) -> None:
        self.apart.setdefault(why, []).append((table, label))


def compare(tables: list[Table], reference: Report, given: Path) -> list[str]:
    """Put `compared` into the cells and remarks into the rows of the tables. Returns the lines of the summary."""
    outcome = Outcome()
    for table in tables:
        entries = {(entry.label, entry.experiment): entry for entry in reference.tables.get(table.name, [])}
        for row in table.rows:
            entry = entries.pop((one_line(row.label), one_line(row.experiment)), None)
            compare_rows(table, row, entry, outcome)
        for label, _ in entries:
            outcome.leave_out("only in the reference", table.name, label)
    names = {table.name for table in tables}
    for name, rows in reference.tables.items():
        if name not in names:
            for entry in rows:
                outcome.leave_out("only in the reference", name, entry.label)
    return outcome_lines(outcome, given)


def compare_rows(table: Table, row: Row, entry: Entry | None, outcome: Outcome) -> None:
    run = row.run
    if not run or not entry:
        if run or entry:
            outcome.leave_out("only here" if run else "only in the reference", table.name, row.label)
        return
    differ = settings_apart(defining_settings(run), entry.settings)
    if differ:
        row.remarks.append(f"differs from the reference: {'; '.join(differ.values())}")
    if not run.completed or entry.status != "completed":
        row.remarks.append(how_both_ended(run, entry))
        sides = {"here": run.completed, "in the reference": entry.status == "completed"}
        where = " and ".join(side for side, completed in sides.items() if not completed)
        outcome.leave_out(f"not completed {where}", table.name, row.label)
        return
    on_cpu = 0 in (run.record.hardware.gpus, entry.gpus)
    outside = []
    for i, (column, header) in enumerate(zip(table.columns, table.headers, strict=True)):
        found = beside(column, row.cells[i], entry.values[column], on_cpu) if column in entry.values else None
        if not found:
            continue
        outcome.on_cpu |= on_cpu
        outcome.within += found.within
        if not found.within:
            outside.append(f"{header} {found.text}")
            found = replace(found, text=found.text + cause(list(differ)))
        row.cells[i] = replace(row.cells[i], compared=found)
    if outside:
        outcome.outside += len(outside)
        outcome.rows_outside.append((table.name, row.label))
        row.remarks.append(f"outside the bands of the reference: {', '.join(outside)}")


def settings_apart(own: dict[str, str], theirs: dict[str, str]) -> dict[str, str]:
    """Name of each setting that differs -> in what."""
    names = [name for name in own | theirs if own.get(name) != theirs.get(name)]
    return {n: f"{n} {short(own.get(n, 'unset'))} instead of {short(theirs.get(n, 'unset'))}" for n in names}


def short(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else f"{text[:LONGEST_SETTING]}..."


def cause(names: list[str]) -> str:
    """The settings that differ, as an addition to a number outside of its band."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f" ({', '.join(map(short, names[:2]))}{more} differ)" if names else ""


def how_both_ended(run: Run, entry: Entry) -> str:
    """Of two runs of which one at least did not complete."""
    if entry.status == "completed":
        return f"the reference completed (job {entry.job_id}), this run did not: {run.status}"
    own = "this run completed" if run.completed else f"this run: {run.status}"
    return f"the reference did not complete (job {entry.job_id}): {short(entry.status)}; {own}"


def outcome_lines(outcome: Outcome, given: Path) -> list[str]:
    """What was compared, what is outside, and what was left out, one sentence each."""
    apart = sum(len(rows) for rows in outcome.apart.values())
    rows = f" in {in_words(len(outcome.rows_outside), 'row')}" if outcome.outside else ""
    counts = f"{in_words(outcome.within, 'number')} within, {outcome.outside} outside{rows}"
    lines = [f"Against the reference {given}: {counts}, {in_words(apart, 'row')} not compared."]
    if outcome.on_cpu:
        lines.append(
            f"Some of these runs are of a CPU, where the bands are wide: {SPEED.cpu:g} % for a speed, instead of "
            f"{SPEED.gpu:g} % on GPUs."
        )
    if outcome.rows_outside:
        lines.append(f"Outside: {by_table(outcome.rows_outside)}.")
    lines += [f"Not compared, {why}: {by_table(rows)}." for why, rows in outcome.apart.items()]
    return [one_line(line) for line in lines]


def by_table(rows: list[tuple[str, str]]) -> str:
    """The rows as "table (label, label), table (label)", as many tables as a line has room for."""
    labels: dict[str, list[str]] = {}
    for table, label in rows:
        labels.setdefault(table, []).append(label)
    more = len(labels) - SHOWN
    listed = [f"{table} ({', '.join(names)})" for table, names in list(labels.items())[:SHOWN]]
    return ", ".join(listed) + (f" and {in_words(more, 'table')} more" if more > 0 else "")
