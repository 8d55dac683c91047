"""The one engine behind all tables: experiments/tables.yaml and the runs in, rows of cells out."""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import yaml

from records.schema import Record
from reporting.metrics import METRICS, PREDICTED, RELATIONS, Cell, header, over_repeats, related
from reporting.runs import INCOMPLETE, Missing, Run
from shared.errors import WorkshopError

TABLE_KEYS = {"id", "title", "question", "rows", "columns", "note", "plots", "per_model", "varies", "transpose"}
TABLE_KEYS |= {"reference", "names", "needs"}
ROW_KEYS = {"label", "experiment", "reference"}
PLOTS = {"loss", "memory", "peaks", "throughput", "efficiency", "speed"}
# Settings that name places and looks. All others define the run. Data size and precision are traits of their own.
NO_TRAIT = {"output_dir", "run_name", "deepspeed", "fsdp", "fsdp_config", "disable_tqdm", "logging_steps"}
NO_TRAIT |= {"train_size", "samples_per_gpu", "fp16", "bf16", "save_total_limit", "resume_from_checkpoint"}
NO_TRAIT |= {"report_to", "local_rank", "optim", "ddp_timeout"}


@dataclass
class Row:
    """label, then the run it shows (None: there is none yet), its repeats, its cells, and what is to be said."""

    label: str
    experiment: str
    run: Run | None
    repeats: list[Run]
    cells: list[Cell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)  # in what it does not compare with the other rows
    absent: str = "not run yet"  # what is said where there is no run

    @property
    def compares(self) -> bool:
        return not self.apart

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


# --- experiments/tables.yaml


def load_definitions(path: Path) -> list[dict]:
    """The tables of a tables.yaml, checked. Exit code 2 with one line when something is wrong in it."""
    way_out = "see the comment at its top"
    try:
        tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise WorkshopError(path, f"is no YAML ({' '.join(str(error).split())})", way_out) from error
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise WorkshopError(path, "is no list of tables", way_out)
    for number, table in enumerate(tables, 1):
        if problem := wrong_in(table):
            raise WorkshopError(path, f"table {table.get('id', number)}: {problem}", way_out)
    return tables


def wrong_in(table: dict) -> str:
    """The first mistake in the definition of a table, empty when there is none."""
    rows = table.get("rows", [])
    needed = [f"{key} in a row" for row in rows for key in ("label", "experiment") if key not in row]
    needed += [key for key in ("id", "title", "question", "rows", "columns") if key not in table]
    if needed:
        return f"no {needed[0]}"
    unknown = {
        "key": table.keys() - TABLE_KEYS,
        "key of a row": {key for row in rows for key in row} - ROW_KEYS,
        "column": {column for column in table["columns"] if not is_column(column)},
        "plot": set(table.get("plots", [])) - PLOTS,
        "field of the run record": {table.get("needs", "status")} - Record.model_fields.keys(),
    }
    return next((f"unknown {what} {min(names)}" for what, names in unknown.items() if names), "")


def is_column(column: str) -> bool:
    relation, _, metric = column.rpartition(".")
    return metric in METRICS and relation in ("", *RELATIONS)


# --- which runs compare


def traits(run: Run) -> dict[str, str]:
    """What must be equal between runs that are compared."""
    record, settings = run.record, run.record.settings
    found = {name: str(value) for name, value in settings if name not in NO_TRAIT and value is not None}
    by_flags = "fp16" if settings.fp16 else "bf16" if settings.bf16 else "fp32"
    audited = record.knobs.get("precision")
    found["precision"] = str(audited.effective) if audited else by_flags
    per_gpu = settings.samples_per_gpu
    found["data size"] = f"{per_gpu} per GPU" if per_gpu else f"{settings.train_size} in all"
    found["hardware"] = str(record.hardware.gpu or record.hardware.cpu)
    if record.git:
        found["commit"] = f"{record.git.commit}"[:10] + (" with changes" if record.git.dirty else "")
    return found


def differences(run: Run, other: Run, varies: Collection[str] = ()) -> str:
    """In what the two runs do not compare, empty when they do. varies: traits that may differ."""
    own = traits(run)
    theirs = traits(other)
    names = [name for name in own | theirs if own.get(name) != theirs.get(name) and name not in varies]
    found = [f"{name} {own.get(name, 'unset')} instead of {theirs.get(name, 'unset')}" for name in names]
    return "; ".join([*found, *sorted({*run.record.overrides} ^ {*other.record.overrides})])


def apart_of(runs: list[Run], varies: Collection[str] = ()) -> dict[Run, list[str]]:
    """Of each run, in what it does not compare with most of the experiments among these.

    What is usual is the value of a trait that most experiments have, of several such values that of the latest run.
    """
    apart = {run: list(run.record.overrides) for run in runs}
    recorded = sorted((run for run in runs if run.has_record), key=lambda run: run.order, reverse=True)
    found = pd.DataFrame([traits(run) for run in recorded], pd.Index(recorded, dtype=object), dtype=object)
    found = found.drop(columns=list(varies), errors="ignore").fillna("unset")
    usable = [run for run in recorded if run.completed and not run.record.overrides and not run.profiled] or recorded
    for name, column in found.to_dict().items():
        once = dict.fromkeys((run.experiment, column[run]) for run in usable)
        usual = Counter(value for _, value in once).most_common(1)[0][0]
        for run, value in column.items():
            if value != usual:
                apart[run].append(f"{name} {value}, others {usual}")
    return apart


def choose(runs: list[Run], apart: dict[Run, list[str]]) -> Run | None:
    """The run that stands for an experiment: the latest completed one that compares, else the latest of any status.

    One that differs from its script, or that the profiler slowed down, stands for it only where there is no other.
    """

    def rank(run: Run) -> tuple:
        differing = len(apart[run]) if run.completed else 0
        return run.completed, not run.record.overrides, not run.profiled, -differing, run.order

    return max(runs, key=rank, default=None)


# --- tables


def build_tables(definitions: list[dict], metrics: pd.DataFrame, all_runs: bool = False) -> list[Table]:
    """Every table of the definitions; one per model where it says so. metrics: as metrics_of gives them."""
    by_experiment: dict[str, list[Run]] = defaultdict(list)
    for run in metrics.index:
        by_experiment[run.experiment].append(run)
    tables = []
    for definition in definitions:
        names = {row["experiment"] for row in definition["rows"]} | {*reference_names(definition)}
        needed = definition.get("needs", "status")
        candidates = {
            name: [run for run in by_experiment[name] if getattr(run.record, needed) is not None] for name in names
        }
        parts = {"": candidates}
        if definition.get("per_model"):
            parts = {model: of_model(candidates, model) for model in models(candidates)}
        for model, own in parts.items():
            table = build_table(definition, own, metrics, all_runs, model)
            for row in table.rows:
                if by_experiment[row.experiment] and not candidates[row.experiment]:
                    reasons = {run.record.missing.get(needed, "") for run in by_experiment[row.experiment]}
                    row.absent = ": ".join(filter(None, [f"no {needed} yet", *sorted(reasons)]))
            tables.append(table)
    return tables


def models(candidates: dict[str, list[Run]]) -> list[str]:
    """Models of these runs, small ones first; one empty name when none is known."""
    sizes: dict[str, int] = {}
    for run in (run for runs in candidates.values() for run in runs):
        sizes[run.model] = max(sizes.get(run.model, 0), run.record.parameters or 0)
    return sorted(filter(None, sizes), key=lambda model: (sizes[model], model)) or [""]


def of_model(candidates: dict[str, list[Run]], model: str) -> dict[str, list[Run]]:
    """Of each experiment that was run with this model its runs, and those that ended before their model was noted."""
    ran = {name for name, runs in candidates.items() if any(run.model == model for run in runs)}
    return {
        name: [run for run in runs if name in ran and run.model in (model, "")] for name, runs in candidates.items()
    }


def build_table(
    definition: dict, candidates: dict[str, list[Run]], metrics: pd.DataFrame, all_runs: bool = False, model: str = ""
) -> Table:
    """candidates: experiment -> its runs. model: to which the table is limited, for its name."""
    columns, varies = definition["columns"], definition.get("varies", ())
    apart = apart_of([run for runs in candidates.values() for run in runs], varies)
    shown = {name: choose(runs, apart) for name, runs in candidates.items()}
    repeated = {name: repeats(shown[name], runs, all_runs) for name, runs in candidates.items()}
    selected = selection(metrics, columns, [run for runs in repeated.values() for run in runs])
    rows = []
    for entry, reference in zip(definition["rows"], reference_names(definition), strict=True):
        row = Row(entry["label"], entry["experiment"], shown[entry["experiment"]], repeated[entry["experiment"]])
        rows.append(row)
        if not row.run:
            row.cells = [Cell(None, "no run yet") for _ in columns]
            continue
        row.apart = apart[row.run]
        row.remarks = remarks(row, candidates[row.experiment], apart, all_runs)
        base = shown[reference]
        if base and "reference" in definition:
            row.apart = row.apart + apart[base]
            where = f"{definition['reference']} (job {base.job_id})"
            row.remarks += [f"{where}: does not compare: {each}" for each in apart[base]]
        row.cells = [cell(column, row, repeated[reference], reference, selected, varies) for column in columns]
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in model.lower())
    return Table(
        name=f"{definition['id']}-{slug}" if model else definition["id"],
        title=f"{definition['title']}: {model}" if model else definition["title"],
        question=definition["question"],
        note=definition.get("note", ""),
        columns=columns,
        headers=headers(definition),
        rows=rows,
        plots=definition.get("plots", []),
        transpose=definition.get("transpose", False),
    )


def list_of(definition: dict, runs: list[Run], metrics: pd.DataFrame) -> Table:
    """A table with a row for each run, which are not compared with one another."""
    table = build_table(definition | {"rows": []}, {}, metrics)
    selected = selection(metrics, table.columns, runs)
    for run, values in zip(runs, selected.itertuples(index=False), strict=True):
        row = Row(run.experiment, run.experiment, run, [run], apart=run.record.overrides)
        row.cells = [over_repeats([value]) for value in values]
        row.remarks = remarks(row, [run], {run: row.apart}, all_runs=False)
        table.rows.append(row)
    return table


def headers(definition: dict) -> list[str]:
    names = definition.get("names", {})
    return [names.get(column) or header(column, definition.get("reference", "")) for column in definition["columns"]]


def reference_names(definition: dict) -> list[str]:
    """The experiment to which the relations of each row refer: its own, else that of the first row."""
    return [row.get("reference", definition["rows"][0]["experiment"]) for row in definition["rows"]]


def repeats(shown: Run | None, runs: list[Run], all_runs: bool) -> list[Run]:
    """The run itself, and with `all_runs` all completed ones of its experiment that compare with it."""
    if not shown or not all_runs or not shown.completed:
        return [shown] if shown else []
    return [shown, *(run for run in runs if run is not shown and run.completed and not differences(run, shown))]


def selection(metrics: pd.DataFrame, columns: list[str], runs: list[Run]) -> pd.DataFrame:
    """The metrics of these runs that the columns need, with their predictions where a column needs them."""
    names = dict.fromkeys(column.rpartition(".")[2] for column in columns)
    selected = metrics.reindex(index=pd.Index(runs, dtype=object), columns=list(names))
    for name in PREDICTED.intersection(names):
        selected[name] = pd.Series([METRICS[name].read(run) for run in runs], selected.index, dtype=object)
    return selected


def cell(
    column: str, row: Row, bases: list[Run], base_name: str, selected: pd.DataFrame, varies: Collection[str]
) -> Cell:
    """The cell of a column: of one run, or the mean over its repeats. bases: runs to which relations refer."""
    relation, _, metric = column.rpartition(".")
    own = mean_of(metric, row.repeats, selected)
    if not relation:
        return own
    if not bases or not bases[0].completed:
        return Cell(None, f"no completed run of {base_name}")
    run, base = row.repeats[0], bases[0]
    reference = mean_of(metric, bases, selected)
    if relation == "reference":
        return reference
    if not run.completed:
        return Cell(None, f"the run's status is {run.status}")
    overridden = ", ".join(dict.fromkeys([*run.record.overrides, *base.record.overrides]))
    differ = "" if run is base else differences(run, base, varies) or overridden
    if differ:
        return Cell(None, f"does not compare with job {base.job_id} ({base_name}): {differ}")
    return related(relation, own, reference, run.record.world_size or 1, base.record.world_size or 1)


def mean_of(metric: str, runs: list[Run], selected: pd.DataFrame) -> Cell:
    values = selected.loc[runs, metric]
    note = "" if isinstance(values.iloc[0], Missing) else METRICS[metric].note(runs[0])
    return over_repeats(values, note)


def remarks(row: Row, runs: list[Run], apart: dict[Run, list[str]], all_runs: bool) -> list[str]:
    """What a reader must know of a row: how its run ended, what is damaged, and which newer run is not shown.

    runs: all of the experiment.
    """
    run = row.repeats[0]
    lines = [run.ended.removeprefix("completed: ")] if run.status_notes else []
    lines += [f"incomplete: {problem}" for problem in run.problems]
    for other in [other for other in runs if other.order > run.order][-1:]:
        why = f"its status is {other.status}"
        if other.completed:
            why = f"it does not compare: {'; '.join(apart[other])}" if apart[other] else "the profiler slowed it down"
        lines.append(f"the newer job {other.job_id} is not shown: {why}")
    if all_runs:
        others = [other for other in runs if other.completed and other not in row.repeats]
        lines += [f"job {other.job_id} is not in the mean: {differences(other, run)}" for other in others]
    return lines + [f"does not compare: {each}" for each in apart[run]]
