"""Write a report into a folder: the page, the numbers, and the files of each table."""

from pathlib import Path

from reporting.definitions import TableDefinition, load_definitions
from reporting.page import GENERATOR, page
from reporting.reference import NUMBERS_FILE, compare, read_reference, write_numbers
from reporting.render import comma_separated, markdown, plural
from reporting.runs import find_runs
from reporting.tables import Table, build_tables, list_runs, preference
from shared.errors import WorkshopError

PREDICTIONS = TableDefinition(
    id="prediction",
    title="Predictions of all experiments",
    question="How far off are the predictions of memory?",
    rows=[],
    columns=["gpus", "estimated_gpu", "peak_gpu", "difference_gpu", "estimated_cpu", "peak_cpu", "difference_cpu"],
    note="Measured CPU memory is that of all processes, with the launcher of several ranks, which the estimate "
    "leaves out.",
)
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
        "peak_gpu",
        "peak_cpu",
        "gpu_hours",
    ],
    note="GPU-hours: GPUs of the job x time from the run record's start to its end, start-up left out; of a resumed "
    "job those of all its parts.",
)


def write_report(folders: list[Path], output: Path, all_runs: bool, reference: Path | None = None) -> str:
    """Write index.html, report.json, and for each table that has runs a .md, a .csv and its plots.

    reference: the folder of another report, or its report.json. Returns what was written, in words.
    """
    definitions = load_definitions()
    for folder in folders:
        if not folder.is_dir():
            raise WorkshopError(folder, "there is no such folder", "give folders of experiments")
    index = output / "index.html"
    if output.is_dir() and any(output.iterdir()) and not (index.is_file() and GENERATOR in index.read_text()):
        raise WorkshopError(output, "holds files that are no report", "give a new folder with -o")
    other = read_reference(reference, output) if reference else None
    runs = find_runs(folders)
    if not runs:
        raise WorkshopError(
            " ".join(map(str, folders)), "no runs below it", "run an experiment first, or give another folder"
        )
    rows_of_experiments = build_tables(definitions, runs, all_runs)
    compared = compare(rows_of_experiments, other, reference) if reference and other else []
    # An experiment keeps the place of its first run, and the last one given here, which is its best
    best = {run.experiment: run for run in [*runs, *sorted(runs, key=preference)]}
    predictable = [run for run in best.values() if run.completed and run.record.configs]
    tables = [*rows_of_experiments, list_runs(PREDICTIONS, predictable), list_runs(ALL_RUNS, runs)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_old(definitions, output)
        images = write_tables(tables, output)
        summary = (
            "Means over the completed runs that compare with the latest one, ± standard deviation (number of runs); "
            "curves of loss and memory show the latest one."
            if all_runs
            else "Each row shows the latest completed run of its experiment that compares with the others."
        )
        index.write_text(page(tables, runs, images, [summary, *compared]), encoding="utf-8")
        write_numbers(rows_of_experiments, output)
    except OSError as error:
        raise WorkshopError(
            error.filename or output, f"cannot be written ({error.strerror})", "give another folder with -o"
        ) from error
    written = f"{plural(len(runs), 'run')}, {plural(sum(table.has_runs for table in tables), 'table')}: {index}"
    return "\n".join([written, *compared])


def write_tables(tables: list[Table], output: Path) -> dict[str, list[tuple[Path, str]]]:
    """Write the files of each table that has runs. Returns table name -> its plots, each with a description."""
    from reporting.plots import draw  # matplotlib takes a second to import, and report.py --job draws nothing

    images = {}
    for table in tables:
        if table.has_runs:
            name = table.definition.id
            images[name] = draw(table, output)
            (output / f"{name}.md").write_text(markdown(table, images[name]), encoding="utf-8")
            (output / f"{name}.csv").write_text(comma_separated(table), encoding="utf-8")
    return images


def remove_old(definitions: list[TableDefinition], output: Path) -> None:
    """Remove the files of an earlier report. A table that no longer has runs would look like a result."""
    (output / NUMBERS_FILE).unlink(missing_ok=True)
    for name in [PREDICTIONS.id, *(definition.id for definition in definitions)]:
        for path in [*output.glob(f"{name}*.md"), *output.glob(f"{name}*.csv"), *output.glob(f"{name}-*.png")]:
            path.unlink()
