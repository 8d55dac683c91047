"""Write a report into a folder: the page, the numbers, and the files of each table."""

from pathlib import Path

from reporting.definitions import TableDefinition, load_definitions
from reporting.page import GENERATOR, render_page
from reporting.reference import NUMBERS_FILE, compare, read_reference, write_numbers
from reporting.render import Plot, plural, render_csv, render_markdown
from reporting.runs import find_runs
from reporting.tables import Table, build_tables, list_runs
from shared.errors import WorkshopError
from shared.files import check_readable

CLASS_PAGE = "class.html"  # the page of a class may be in the same folder
ALL_RUNS = TableDefinition(
    id="runs",
    title="All runs",
    question="What ran, how did it end, and what did it cost?",
    rows=[],
    columns=[
        "model",
        "gpus",
        "runtime",
        "samples_per_second",
        "train_loss",
        "eval_loss",
        "exact_match",
        "f1",
        "peak_gpu",
        "peak_cpu",
        "peak_process",
        "gpu_hours",
        "kwh",
    ],
    names={"samples_per_second": "Samples/s with evaluation"},
    note="GPU-hours: GPUs of the job x time from the start of the run record to its end, without the start-up. kWh: "
    "energy of these GPUs from the start of the training to the end of the run; a failed run has no value. A resumed "
    "job counts all its parts.",
)
OWN_RUNS = TableDefinition(
    id="own",
    title="Your own runs",
    question="Which method and settings fit best: how good is each model, and what did its training cost?",
    rows=[],
    columns=[
        "exact_match",
        "f1",
        "eval_loss",
        "steady_samples_per_second",
        "held_state",
        "peak_gpu",
        "peak_process",
        "output_dir",
        "train_loss",
        "gpu_hours",
    ],
    names={"steady_samples_per_second": "Samples/s"},
    note="Each setting in which these runs differ is a column, unless it follows from the method or the data set "
    "(GRAD_ACC with the same global batch, EVAL_SIZE). Samples/s leave out evaluation, saving and the warm-up. "
    "Model state: the parameters, gradients and optimizer state that a rank held.",
    plots=["held", "rates"],
)


def write_report(folders: list[Path], output: Path, all_runs: bool, reference: Path | None = None) -> str:
    """Write index.html, report.json, and a .md and a .csv of each table that has runs.

    reference: the folder of another report or its report.json. Returns a summary of the written report.
    """
    definitions = load_definitions()
    known = {row.experiment for definition in definitions for row in definition.rows}
    check_readable(*folders, output, reference or output)
    for folder in folders:
        if not folder.is_dir():
            raise WorkshopError(folder, "there is no such folder", "give folders of experiments")
    index = output / "index.html"
    others = {path.name for path in output.iterdir()} - {CLASS_PAGE} if output.is_dir() else set()
    if others and not (index.is_file() and GENERATOR in index.read_text()):
        raise WorkshopError(output, "contains files, but not a report", "give a new folder with -o")
    other = read_reference(reference, output) if reference else None
    runs = find_runs(folders)
    if not runs:
        check_readable(*(inner for folder in folders for inner in folder.rglob("*/")))
        raise WorkshopError(
            " ".join(map(str, folders)), "no runs found", "run an experiment first, or give another folder"
        )
    experiment_tables = build_tables(definitions, runs, all_runs)
    compared = [compare(experiment_tables, other, reference)] if reference and other else []
    own = [run for run in runs if run.experiment not in known]
    listed = runs if len(own) < len(runs) else []  # the table of the own runs already shows them all
    tables = [list_runs(OWN_RUNS, own, True), *experiment_tables, list_runs(ALL_RUNS, listed, False)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_old_files([*definitions, OWN_RUNS, ALL_RUNS], output)
        plots = write_tables(tables, output)
        summary = (
            "A row of an experiment shows the mean over the completed runs that are comparable with its latest run, "
            "± standard deviation (number of runs). The curves of loss and memory show the latest run."
            if all_runs
            else "A row of an experiment shows its latest completed run that is comparable with the other rows."
        )
        index.write_text(render_page(tables, runs, plots, [summary, *compared]), encoding="utf-8", errors="replace")
        write_numbers(experiment_tables, output)
    except OSError as error:
        raise WorkshopError(
            error.filename or output, f"cannot be written ({error.strerror})", "give another folder with -o"
        ) from error
    written = f"{plural(len(runs), 'run')}, {plural(sum(table.has_runs for table in tables), 'table')}: {index}"
    return "\n".join([written, *compared])


def write_tables(tables: list[Table], output: Path) -> dict[str, list[Plot]]:
    """Write the files of each table that has runs. Returns table name -> its plots, for the page."""
    from reporting.plots import draw_plots  # Importing matplotlib takes a second, and report.py --job needs no plots.

    plots = {}
    for table in tables:
        if table.has_runs:
            name = table.definition.id
            plots[name] = draw_plots(table)
            (output / f"{name}.md").write_text(render_markdown(table), encoding="utf-8", errors="replace")
            (output / f"{name}.csv").write_text(render_csv(table), encoding="utf-8", errors="replace")
    return plots


def remove_old_files(definitions: list[TableDefinition], output: Path) -> None:
    """Remove the files of an earlier report. Otherwise a table that no longer has runs would look like a result."""
    (output / NUMBERS_FILE).unlink(missing_ok=True)
    for definition in definitions:
        for path in [*output.glob(f"{definition.id}*.md"), *output.glob(f"{definition.id}*.csv")]:
            path.unlink()
