"""The table of one run, for the terminal."""

from pathlib import Path

from records.schema import read_record
from reporting.definitions import RowDefinition, table_definition
from reporting.metrics import MOST_EPOCHS
from reporting.render import grid, lines_of, plural
from reporting.runs import NO_GPU, note_how_to_resume, read_run
from reporting.tables import build_table

MEMORY_COLUMNS = ["peak_gpu", "low_gpu", "mean_gpu", "peak_cpu", "mean_cpu"]


def job_table(path: Path) -> str:
    """Return the baseline table and the memory of one run. A missing value is empty, with its reason."""
    read_record(path)  # raises WorkshopError for a file that is not a run record
    run = read_run(path)
    note_how_to_resume([run])
    definition = table_definition("baseline")
    evaluations = [f"eval_loss_{n}" for n in range(1, len(run.record.eval) + 1)][:MOST_EPOCHS]
    first, *others = [name for name in definition.columns if not name.startswith("eval_loss")]
    if not run.record.settings.em_f1:
        others = [name for name in others if name not in ("exact_match", "f1")]
    columns = [first, *evaluations, *others, *MEMORY_COLUMNS]
    rows = [RowDefinition(label="Value", experiment=run.experiment)]
    definition = definition.model_copy(update={"columns": columns, "rows": rows})
    _, lines = lines_of(build_table(definition, {run.experiment: [run]}))
    shown = [line for line in lines if line[-1] != NO_GPU]
    left_out = [f"no GPU: {plural(len(lines) - len(shown), 'row')} left out"] if len(shown) < len(lines) else []
    output = run.record.output_dir
    saved = output and (run.folder / output / "config.json").exists()
    return "\n".join(
        [
            "",
            f"Baseline summary of {run.job_id} ({run.ended}, {run.record.settings.model_name})",
            "",
            grid(["Metric", "Value", "Note"], shown),
            "",
            *left_out,
            *(f"incomplete: {problem}" for problem in run.problems),
            *(f"does not compare: {override}" for override in run.record.overrides),
            f"model:      {output if saved else 'not saved'}",
            f"run record: {path}",
        ]
    )
