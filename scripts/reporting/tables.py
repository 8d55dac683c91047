"""The one engine behind all tables: experiments/tables.yaml and the runs in, rows of cells out."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from errors import WorkshopError
from reporting.metrics import METRICS, RELATIONS, Cell, cell, header
from reporting.record import Record
from reporting.runs import INCOMPLETE, Run

TABLE_KEYS = {"id", "title", "question", "rows", "columns", "note", "plots", "per_model", "varies", "transpose"}
TABLE_KEYS |= {"reference", "names", "needs"}
ROW_KEYS = {"label", "experiment", "reference"}
PLOTS = {"loss", "memory", "peaks", "throughput", "efficiency", "speed", "prediction"}
# Settings that name places and looks. All others define the run. Data size and precision are traits of their own.
NO_TRAIT = {"output_dir", "run_name", "deepspeed", "fsdp", "fsdp_config", "disable_tqdm", "logging_steps"}
NO_TRAIT |= {"train_size", "samples_per_gpu", "fp16", "bf16", "save_total_limit", "resume_from_checkpoint"}
NO_TRAIT |= {"report_to", "local_rank", "optim", "ddp_timeout"}
LONGEST_SLUG = 60


@dataclass
class Row:
    """label, then the run it shows (None: there is none yet), its repeats, its cells, and what is to be said."""

    label: str
    experiment: str
    run: Run | None
    repeats: list[Run]
    cells: list[Cell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    compares: bool = True  # with the other rows, and with the run to which its relations refer
    absent: str = "not run yet"  # what is said where there is no run

    @property
    def jobs(self) -> str:
        """Ids of the jobs whose values the cells hold."""
        return ", ".join(run.job_id for run in self.repeats)

    @property
    def status(self) -> str:
        """The run's status, and what a reader of its numbers must know."""
        if not self.run:
            return self.absent
        words = [self.run.status]
        if self.run.problems and self.run.has_record:
            words.append(INCOMPLETE)
        if self.run.completed and not self.compares:
            words.append("does not compare")
        return ", ".join(words)


@dataclass
class Table:
    name: str
    title: str
    question: str
    note: str
    columns: list[str]
    headers: list[str]
    rows: list[Row]
    plots: list[str]
    transpose: bool = False

    @property
    def has_runs(self) -> bool:
        return any(row.run for row in self.rows)


def load_definitions(path: Path) -> list[dict]:
    """The tables of a tables.yaml, checked. Exit code 2 with one line when something is wrong in it."""
    way_out = "see the comment at its top"
    try:
        tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkshopError(
            path, f"cannot be read ({getattr(error, 'strerror', None) or error})", "restore it with git checkout"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{path}:{mark.line + 1}" if mark else path
        raise WorkshopError(line, f"is no YAML ({getattr(error, 'problem', error)})", way_out) from error
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise WorkshopError(path, "is no list of tables", way_out)
    for number, table in enumerate(tables, 1):
        if problem := wrong_in(table):
            raise WorkshopError(path, f"table {table.get('id', number)}: {problem}", way_out)
    if repeated := [name for name, count in Counter(table["id"] for table in tables).items() if count > 1]:
        raise WorkshopError(path, f"table {repeated[0]}: there are two of this id", way_out)
    return tables


def wrong_in(table: dict) -> str:
    """The first mistake in the definition of a table, empty when there is none."""
    if missing := {"id", "title", "question", "rows", "columns"} - table.keys():
        return f"no {min(missing)}"
    if unknown := table.keys() - TABLE_KEYS:
        return f"unknown key {min(unknown)}"
    for column in table["columns"]:
        relation, _, metric = str(column).rpartition(".")
        if metric not in METRICS or (relation and relation not in RELATIONS):
            return f"unknown column {column}"
    for row in table["rows"]:
        if not isinstance(row, dict) or not {"label", "experiment"} <= row.keys() <= ROW_KEYS:
            return f"row {row} has other keys than label, experiment and reference"
    if table.get("needs", "status") not in Record.model_fields:
        return f"unknown field {table['needs']} of the run record"
    if unknown := set(table.get("plots", [])) - PLOTS:
        return f"unknown plot {min(unknown)}"
    return ""


def build_tables(definitions: list[dict], runs: list[Run], all_runs: bool = False) -> list[Table]:
    """Every table of the definitions; one per model where it says so."""
    by_experiment: dict[str, list[Run]] = {}
    for run in runs:
        by_experiment.setdefault(run.experiment, []).append(run)
    tables = []
    for definition in definitions:
        names = {name for row in definition["rows"] for name in (row["experiment"], row.get("reference")) if name}
        needed = definition.get("needs", "status")
        candidates = {name: [run for run in by_experiment.get(name, []) if run.get(needed)] for name in names}
        if not definition.get("per_model"):
            table = build_table(definition, candidates, all_runs)
            say_what_is_missing(table, needed, by_experiment)
            tables.append(table)
            continue
        for model in models(candidates):
            own = {name: [r for r in found if r.model == model] for name, found in candidates.items()}
            tables.append(build_table(definition, own, all_runs, model))
    name_apart(tables)
    return tables


def say_what_is_missing(table: Table, needed: str, by_experiment: dict[str, list[Run]]) -> None:
    """Of a row whose experiment has run, but never with the field that the table needs."""
    for row in table.rows:
        if row.run or not (runs := by_experiment.get(row.experiment)):
            continue
        reasons = [f"job {run.job_id}: {reason}" for run in runs if (reason := run.record.missing.get(needed))]
        row.absent = f"no {needed} yet" + (f" ({reasons[-1]})" if reasons else "")


def name_apart(tables: list[Table]) -> None:
    """Number the tables of models that differ in what a file name does not show."""
    taken: set[str] = set()
    for table in tables:
        name, number = table.name, 1
        while table.name in taken:
            number += 1
            table.name = f"{name}-{number}"
        taken.add(table.name)


def models(candidates: dict[str, list[Run]]) -> list[str]:
    """Models of these runs, small ones first; one empty name when there is no run."""
    sizes: dict[str, float] = {}
    for run in (run for runs in candidates.values() for run in runs):
        sizes[run.model] = max(sizes.get(run.model, 0), run.record.parameters or 0)
    return sorted(sizes, key=lambda model: (sizes[model], model)) or [""]


def build_table(definition: dict, candidates: dict[str, list[Run]], all_runs: bool, model: str = "") -> Table:
    rows = []
    for row in definition["rows"]:
        shown = chosen(candidates[row["experiment"]])
        rows.append(
            Row(row["label"], row["experiment"], shown, repeats(shown, candidates[row["experiment"]], all_runs))
        )
    varies = set(definition.get("varies", []))
    references = reference_names(definition)
    for row, reference in zip(rows, references, strict=True):
        if row.run:
            base = chosen(candidates[reference])
            base_runs = repeats(base, candidates[reference], all_runs) if base and base.completed else []
            differ = why_apart(row.run, base, varies) if base else ""
            row.cells = [cell(column, row.repeats, base_runs, reference, differ) for column in definition["columns"]]
            row.remarks += remarks(row.run, row.repeats, candidates[row.experiment], all_runs)
        else:
            row.cells = [Cell(None, "no run yet") for _ in definition["columns"]]
    bases = [chosen(candidates[name]) if "reference" in definition else None for name in references]
    compared = [(row, row.run, "") for row in rows if row.run and row.run.has_record]
    for row, base in zip(rows, bases, strict=True):
        if row.run and base and base.has_record:
            compared.append((row, base, f"{definition.get('reference')} (job {base.job_id}): "))
    mark_differences(compared, varies)
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in model.split("/")[-1].lower())[:LONGEST_SLUG]
    return Table(
        name=f"{definition['id']}-{slug}" if model else definition["id"],
        title=f"{definition['title']}: {model}" if model else definition["title"],
        question=definition["question"],
        note=definition.get("note", ""),
        columns=definition["columns"],
        headers=headers(definition),
        rows=rows,
        plots=definition.get("plots", []),
        transpose=definition.get("transpose", False),
    )


def headers(definition: dict) -> list[str]:
    names = definition.get("names", {})
    return [names.get(column) or header(column, definition.get("reference", "")) for column in definition["columns"]]


def reference_names(definition: dict) -> list[str]:
    """The experiment to which the relations of each row refer: its own, else that of the first row."""
    return [row.get("reference", definition["rows"][0]["experiment"]) for row in definition["rows"]]


def chosen(runs: list[Run]) -> Run | None:
    """The run that stands for an experiment: the latest completed one, else the latest of any status.

    One that differs from its script, or that the profiler slowed down, stands for it only where there is no other.
    """
    return max(
        runs,
        key=lambda run: (run.completed, not run.record.overrides, not run.profiled, run.order),
        default=None,
    )


def repeats(shown: Run | None, runs: list[Run], all_runs: bool) -> list[Run]:
    """The run itself, and with `all_runs` all completed ones that compare with it."""
    if not shown or not all_runs or not shown.completed:
        return [shown] if shown else []
    return [shown] + [run for run in runs if run is not shown and run.completed and not differences(run, shown)]


def remarks(run: Run, repeats: list[Run], runs: list[Run], all_runs: bool) -> list[str]:
    """What a reader must know of a row's run: how it ended, what is damaged, and which newer run is not shown.

    repeats: the runs whose mean the row shows. runs: all of the experiment.
    """
    lines = [f"{run.status}: {run.status_note}"] if run.status_note else []
    lines += [f"incomplete: {problem}" for problem in run.problems] + run.notes
    for other in [other for other in runs if other.order > run.order][-1:]:
        why = f"its status is {other.status}"
        if other.completed:
            apart = ", ".join(other.record.overrides)
            why = f"it does not compare: {apart}" if apart else "the profiler slowed it down"
        lines.append(f"the newer job {other.job_id} is not shown: {why}")
    if all_runs:
        others = [other for other in runs if other.completed and other not in repeats]
        lines += [f"job {other.job_id} is not in the mean: {differences(other, run)}" for other in others]
    return lines


def traits(run: Run) -> dict[str, str]:
    """What must be equal between runs that are compared."""
    record, settings = run.record, run.record.settings
    found = {name: str(value) for name, value in settings if name not in NO_TRAIT and value is not None}
    by_flags = "fp16" if settings.fp16 else "bf16" if settings.bf16 else "fp32"
    found["precision"] = record.knobs.precision.effective or by_flags
    per_gpu = settings.samples_per_gpu
    found["data size"] = f"{per_gpu} per GPU" if per_gpu else f"{settings.train_size} in all"
    found["hardware"] = str(record.hardware.gpu or record.hardware.cpu)
    commit = str(record.git.commit)[:10]
    found["commit"] = f"{commit} with changes" if record.git.dirty else commit
    return found


def differences(run: Run, other: Run, varies: Collection[str] = ()) -> str:
    """In what the two runs do not compare, empty when they do. varies: traits that may differ."""
    own = traits(run)
    theirs = traits(other)
    names = [name for name in own | theirs if own.get(name) != theirs.get(name) and name not in varies]
    found = [f"{name} {own.get(name, 'unset')} instead of {theirs.get(name, 'unset')}" for name in names]
    return "; ".join([*found, *sorted({*run.record.overrides} ^ {*other.record.overrides})])


def why_apart(run: Run, base: Run, varies: Collection[str]) -> str:
    """Why relations of the run to another one say nothing, empty when they do."""
    if run is base:
        return ""
    overridden = dict.fromkeys([*run.record.overrides, *base.record.overrides])
    return differences(run, base, varies) or ", ".join(overridden)


def mark_differences(compared: list[tuple[Row, Run, str]], varies: set[str]) -> None:
    """Mark each row whose run differs from the table's most frequent value of a trait, and say in which."""
    for row, run, prefix in compared:
        if run.record.overrides:
            row.compares = False
            if prefix:  # a row's own run has it in its status note
                row.remarks.append(f"{prefix}does not compare: {', '.join(run.record.overrides)}")
    found = [(row, traits(run), prefix) for row, run, prefix in compared]
    for name in dict.fromkeys(name for _, own, _ in found for name in own if name not in varies):
        usual = Counter(own.get(name, "unset") for _, own, _ in found).most_common(1)[0][0]
        for row, own, prefix in found:
            if own.get(name, "unset") != usual:
                row.compares = False
                row.remarks.append(f"{prefix}does not compare: {name} {own.get(name, 'unset')}, others {usual}")
