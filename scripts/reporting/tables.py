"""Build each table from its definition and the runs: choose the run for each row, and fill the row's cells."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from config import DEFAULTS, facts
from distributed.strategy import BY_NAME
from reporting.definitions import TableDefinition
from reporting.metrics import Cell, Value, build_metric_cell, relate
from reporting.runs import INCOMPLETE, ReportedRun
from settings.optimizers import algorithm

AFTER_TRAINING = ("em_f1", "em_f1_batch_size")  # they change neither the model nor the cost of its training
PARENTS = re.compile("[^,]*/")  # of each file in a list
AUDITED = ("global batch", "trainable weights")  # they differ between methods with equal settings


@dataclass
class TableRow:
    """A row of a table. run: the run that the row shows, or None if the experiment has no run yet.

    repeats: the runs whose numbers the cells contain, with `run` first.
    """

    label: str
    experiment: str
    run: ReportedRun | None
    repeats: list[ReportedRun]
    cells: list[Cell] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)  # reasons why the row is not comparable with the other rows
    absent: str = "not run yet"  # the status of a row without a run
    name: str = ""  # the label with the settings that distinguish the row, if other rows have the same label

    @property
    def jobs(self) -> str:
        """The ids of the jobs whose numbers the cells contain."""
        return ", ".join(run.job_id for run in self.repeats)

    @property
    def status(self) -> str:
        """The run's status, with a warning if its data are incomplete or it is not comparable with the other rows."""
        if not self.run:
            return self.absent
        words = [self.run.status]
        if self.run.problems and self.run.has_record:
            words.append(INCOMPLETE)
        if self.run.completed and self.mismatches:
            words.append("not comparable")
        return ", ".join(words)


@dataclass
class Table:
    """A table: its definition, and its rows with the numbers of the runs."""

    definition: TableDefinition
    rows: list[TableRow]

    @property
    def has_runs(self) -> bool:
        return any(row.run for row in self.rows)


# --- comparability of runs


def run_settings(run: ReportedRun) -> dict[str, Value]:
    """Return the settings that change what a run computes or costs, as numbers or texts. Unset ones are left out."""
    record, settings = run.record, run.record.settings
    # A flag that is younger than the record had its default
    values = {flag: value for flag, value in DEFAULTS.items() if not facts(flag).only_for}
    values |= {name: value for name, value in settings if value is not None}
    if values["per_device_eval_batch_size"] == values["per_device_train_batch_size"]:
        values["per_device_eval_batch_size"] = None  # it follows from BATCH_SIZE
    found = {
        name: value
        for name, value in values.items()
        if value is not None and facts(name).changes != "nothing" and facts(name).compared_as in ("", "strategy")
    }
    by_flags = "fp16" if settings.fp16 else "bf16" if settings.bf16 else "fp32"
    audited = record.knobs.get("precision")
    found["precision"] = audited.effective if audited else by_flags
    audited = record.knobs.get("optimizer")
    found["optimizer"] = algorithm(str(audited.effective if audited else values["optim"]))
    per_gpu = settings.samples_per_gpu
    found["data size"] = f"{per_gpu} per GPU" if per_gpu else f"{settings.train_size} in all"
    return {name: value if type(value) in (int, float) else str(value) for name, value in found.items()}


def traits(run: ReportedRun) -> dict[str, str]:
    """Return the settings and hardware that must be equal for two runs to compare."""
    record = run.record
    settings = run_settings(run).items()
    found = {name: str(value).removesuffix(".0") for name, value in settings if facts(name).compared_as != "strategy"}
    found["hardware"] = str(record.hardware.gpu or record.hardware.cpu)
    if record.git:
        found["commit"] = f"{record.git.commit}"[:10] + (" with changes" if record.git.dirty else "")
    return found


def trait_differences(run: ReportedRun, other: ReportedRun, varies: Collection[str] = ()) -> str:
    """Describe why two runs are not comparable, empty if they are comparable. varies: traits that may differ."""
    found = setting_differences(traits(run), traits(other), varies)
    return "; ".join([*found, *sorted({*run.record.overrides} ^ {*other.record.overrides})])


def setting_differences(own: dict[str, str], other: dict[str, str], varies: Collection[str] = ()) -> list[str]:
    names = [name for name in own | other if own.get(name) != other.get(name) and name not in varies]
    return [f"{name} {own.get(name, 'unset')} instead of {other.get(name, 'unset')}" for name in names]


def find_mismatches(runs: list[ReportedRun], varies: Collection[str] = ()) -> dict[ReportedRun, list[str]]:
    """Return for each run the reasons why it is not comparable with most experiments. varies: traits that may differ.

    The usual value of a trait is the most common one over the experiments. In a tie, the latest run's value counts.
    """
    mismatches = {run: list(run.record.overrides) for run in runs}
    recorded = sorted((run for run in runs if run.has_record), key=lambda run: run.sort_key, reverse=True)
    found = {run: traits(run) for run in recorded}
    usable = [run for run in recorded if run.completed and not run.record.overrides and not run.profiled] or recorded
    for name in dict.fromkeys(name for own in found.values() for name in own if name not in varies):
        column = {run: own.get(name, "unset") for run, own in found.items()}
        once = dict.fromkeys((run.experiment, column[run]) for run in usable)
        usual = Counter(value for _, value in once).most_common(1)[0][0]
        for run, value in column.items():
            if value != usual:
                mismatches[run].append(f"{name} {value}, others {usual}")
    return mismatches


def preference(run: ReportedRun, mismatches: Collection[str] = ()) -> tuple:
    """Return a sort key that puts an experiment's best run last: the latest completed run with the fewest mismatches.

    A run that differs from its script, or that the profiler slowed down, comes before all other completed runs.
    """
    differing = len(mismatches) if run.completed else 0
    return run.completed, not run.record.overrides, not run.profiled, -differing, run.sort_key


# --- tables


def build_tables(definitions: list[TableDefinition], runs: list[ReportedRun], all_runs: bool = False) -> list[Table]:
    """Build all tables. A definition with `per_model` makes one table per model."""
    by_experiment: dict[str, list[ReportedRun]] = defaultdict(list)
    for run in runs:
        by_experiment[run.experiment].append(run)
    tables = []
    for definition in definitions:
        needed = definition.needs
        candidates = {
            name: [run for run in by_experiment[name] if getattr(run.record, needed) is not None]
            for name in (*(row.experiment for row in definition.rows), *definition.references)
        }
        parts = {"": candidates}
        if definition.per_model:
            parts = {model: select_model(candidates, model) for model in find_models(candidates)}
        for model, own in parts.items():
            table = build_table(definition, own, all_runs, model)
            for row in table.rows:
                if by_experiment[row.experiment] and not candidates[row.experiment]:
                    reasons = {run.record.missing.get(needed, "") for run in by_experiment[row.experiment]}
                    row.absent = ": ".join(filter(None, [f"no {needed} yet", *sorted(reasons)]))
            tables.append(table)
    return tables


def find_models(candidates: dict[str, list[ReportedRun]]) -> list[str]:
    """Return the models of these runs, the smallest first. If no run has a model, return one empty name."""
    sizes: dict[str, int] = {}
    for run in (run for runs in candidates.values() for run in runs):
        sizes[run.model] = max(sizes.get(run.model, 0), run.record.parameters or 0)
    return sorted(filter(None, sizes), key=lambda model: (sizes[model], model)) or [""]


def select_model(candidates: dict[str, list[ReportedRun]], model: str) -> dict[str, list[ReportedRun]]:
    """Keep the runs of one model. Runs without a known model stay if their experiment has a run of this model."""
    kept = {name for name, runs in candidates.items() if any(run.model == model for run in runs)}
    return {
        name: [run for run in runs if name in kept and run.model in (model, "")] for name, runs in candidates.items()
    }


def build_table(
    definition: TableDefinition, candidates: dict[str, list[ReportedRun]], all_runs: bool = False, model: str = ""
) -> Table:
    """Build one table. candidates: experiment -> its runs. model: the model to add to the table's id and title."""
    varies = definition.varies
    mismatches = find_mismatches([run for runs in candidates.values() for run in runs], varies)
    chosen = {
        name: max(runs, key=lambda run: preference(run, mismatches[run]), default=None)
        for name, runs in candidates.items()
    }
    repeated = {name: select_repeats(chosen[name], runs, all_runs) for name, runs in candidates.items()}
    rows = []
    for entry, reference in zip(definition.rows, definition.references, strict=True):
        row = TableRow(entry.label, entry.experiment, chosen[entry.experiment], repeated[entry.experiment])
        rows.append(row)
        if not row.run:
            row.cells = [Cell(None, "no run yet") for _ in definition.columns]
            continue
        row.mismatches = mismatches[row.run]
        row.remarks = row_remarks(row, candidates[row.experiment], mismatches, all_runs)
        base = chosen[reference]
        if base and definition.reference:
            row.mismatches = row.mismatches + mismatches[base]
            source = f"{definition.reference} (job {base.job_id})"
            row.remarks += [f"{source}: not comparable: {each}" for each in mismatches[base]]
        row.cells = [build_cell(column, row, repeated[reference], reference, varies) for column in definition.columns]
    if model:
        slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in model.lower())
        names = {"id": f"{definition.id}-{slug}", "title": f"{definition.title}: {model}"}
        definition = definition.model_copy(update=names)
    return Table(definition, rows)


def list_runs(definition: TableDefinition, runs: list[ReportedRun], with_settings: bool) -> Table:
    """Build a table with a row for each run. The rows are not compared with each other.

    with_settings: add a column for each setting in which the runs differ, and order the rows by method and settings.
    """
    settings = differing_settings(runs) if with_settings else {}
    table = Table(
        definition.model_copy(
            update={
                "columns": [*settings, *definition.columns],
                "names": definition.names | {name: name for name in settings},
            }
        ),
        [],
    )
    if with_settings:
        runs = sorted(
            runs,
            key=lambda run: (
                [*BY_NAME, run.strategy].index(run.strategy),  # from plain to FSDP; an unknown strategy is the last
                run.record.world_size or 0,
                [(isinstance(values[run], str), values[run]) for values in settings.values() if run in values],
            ),
        )
    for run in runs:
        row = TableRow(run.experiment, run.experiment, run, [run], mismatches=run.record.overrides)
        row.name = distinct_name(run, [other for other in runs if other.experiment == run.experiment])
        row.cells = [Cell(setting_text(values.get(run, ""))) for values in settings.values()]
        row.cells += [build_metric_cell(metric, [run]) for metric in definition.columns]
        row.remarks = row_remarks(row, [run], {run: row.mismatches}, all_runs=False)
        table.rows.append(row)
    return table


def distinct_name(run: ReportedRun, runs: list[ReportedRun]) -> str:
    """Name a run by its experiment and the few settings that tell it apart from these runs."""
    name = run.experiment
    differing = [(setting, values) for setting, values in differing_settings(runs).items() if run in values]
    # The rarest value comes first, and may be enough
    for setting, values in sorted(differing, key=lambda item: [*item[1].values()].count(item[1][run])):
        equal = [other for other in runs if values.get(other) == values[run]]
        if len(equal) < len(runs):
            name += f", {setting} {setting_text(values[run])}"
            runs = equal
    return name


def setting_text(value: Value) -> str:
    """Write a setting as a user types it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing_settings(runs: list[ReportedRun]) -> dict[str, dict[ReportedRun, Value]]:
    """Return the settings in which these runs differ: variable or flag -> the value of each run with a record.

    What follows from the method (a strategy's config, the parts of a batch) or from the data set (what has no default
    of its own) counts only if it differs between runs of one method or data set.
    """
    found = {
        run: run_settings(run)
        | {name: str(knob.effective) for name, knob in run.record.knobs.items() if name in AUDITED}
        for run in runs
        if run.has_record
    }
    differing = {}
    for name in dict.fromkeys(name for own in found.values() for name in own if name not in AFTER_TRAINING):
        values = {run: own.get(name, "unset") for run, own in found.items()}
        pairs = {(cause(name, run), values[run]) for run in found}
        if len(pairs) > len(dict(pairs)):
            short = {run: PARENTS.sub("", value) if type(value) is str else value for run, value in values.items()}
            ambiguous = len({*short.values()}) < len({*values.values()})
            differing[facts(name).variable or name] = values if ambiguous else short
    return differing


def cause(name: str, run: ReportedRun) -> str:
    """Return the part of a run from which this setting usually follows, empty if it is set for itself."""
    if facts(name).compared_as == "strategy" or name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        return run.method
    return str(run.get("settings.dataset")) if name == "data size" or DEFAULTS.get(name, "") is None else ""


def select_repeats(chosen: ReportedRun | None, runs: list[ReportedRun], all_runs: bool) -> list[ReportedRun]:
    """Return the chosen run. With `all_runs`, add the completed runs of its experiment that compare with it."""
    if not chosen or not all_runs or not chosen.completed:
        return [chosen] if chosen else []
    others = [run for run in runs if run is not chosen and run.completed]
    return [chosen, *(run for run in others if not trait_differences(run, chosen))]


def build_cell(column: str, row: TableRow, bases: list[ReportedRun], base_name: str, varies: Collection[str]) -> Cell:
    """Build a row's cell from its run or its repeats. bases: the runs of the reference experiment."""
    relation, _, metric = column.rpartition(".")
    if not relation:
        return build_metric_cell(metric, row.repeats)
    if not bases or not bases[0].completed:
        return Cell(None, f"no completed run of {base_name}")
    run, base = row.repeats[0], bases[0]
    reference = build_metric_cell(metric, bases)
    if relation == "reference":
        return reference
    if not run.completed:
        return Cell(None, f"the run's status is {run.status}")
    overridden = ", ".join(dict.fromkeys([*run.record.overrides, *base.record.overrides]))
    differ = "" if run is base else trait_differences(run, base, varies) or overridden
    if differ:
        return Cell(None, f"not comparable with job {base.job_id} ({base_name}): {differ}")
    own = build_metric_cell(metric, row.repeats)
    return relate(relation, own, reference, run.record.world_size or 1, base.record.world_size or 1)


def row_remarks(
    row: TableRow, runs: list[ReportedRun], mismatches: dict[ReportedRun, list[str]], all_runs: bool
) -> list[str]:
    """List the notes for a row: the end of its run, damaged files, mismatches, and a newer run that is not shown.

    runs: all runs of the experiment.
    """
    run = row.repeats[0]
    lines = [run.outcome.removeprefix("completed: ")] if run.status_notes else []
    lines += [f"incomplete: {problem}" for problem in run.problems]
    for other in [other for other in runs if other.sort_key > run.sort_key][-1:]:
        reason = f"its status is {other.status}"
        if other.completed:
            differ = "; ".join(mismatches[other])
            reason = f"it is not comparable: {differ}" if differ else "the profiler slowed it down"
        lines.append(f"the newer job {other.job_id} is not shown: {reason}")
    if all_runs:
        others = [other for other in runs if other.completed and other not in row.repeats]
        lines += [f"job {other.job_id} is not in the mean: {trait_differences(other, run)}" for other in others]
    return lines + [f"not comparable: {each}" for each in mismatches[run]]
