"""The workshop's tables and plots, from the records and memory logs that the runs left.

python scripts/report.py                                   # all experiments, into report/
python scripts/report.py experiments/deepspeed-multi-gpu   # the runs below these folders only
python scripts/report.py --all-runs -o /tmp/report         # mean and standard deviation over repeats
python scripts/report.py --reference /shared/reference     # beside the numbers of that report
python scripts/report.py --job results/123.json            # one run, in the terminal

Open report/index.html in a browser: it is one file and needs no network.
"""

import argparse
import os
from pathlib import Path

from records.schema import read_record
from reporting.metrics import MOST_EPOCHS, metrics_of
from reporting.page import GENERATOR, page
from reporting.reference import NAME, compare, read_reference, write_numbers
from reporting.render import comma_separated, grid, in_words, lines_of, markdown
from reporting.runs import NO_GPU, Run, find_runs, read_run, say_how_to_go_on
from reporting.tables import Table, build_table, build_tables, choose, list_of, load_definitions
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.paths import REPOSITORY

DEFINITIONS = REPOSITORY / "experiments" / "tables.yaml"
MEMORY_COLUMNS = ["peak_gpu", "low_gpu", "mean_gpu", "peak_cpu", "mean_cpu"]
PREDICTIONS = {
    "id": "prediction",
    "title": "Predictions of all experiments",
    "question": "How far off are the predictions of memory?",
    "columns": ["gpus", "estimated_gpu", "peak_gpu", "difference_gpu", "estimated_cpu", "peak_cpu", "difference_cpu"],
    "note": "Measured CPU memory is that of all processes, with the launcher of several ranks, which the estimate "
    "leaves out.",
}
ALL_RUNS = {
    "id": "runs",
    "title": "All runs",
    "question": "What ran, how did it end, and what did it cost?",
    "columns": [
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
    "note": "GPU-hours: GPUs of the job x time from the run record's start to its end, start-up left out; of a resumed "
    "job those of all its parts.",
}


def write_report(folders: list[Path], output: Path, all_runs: bool, reference: Path | None = None) -> str:
    """Write index.html, report.json, and for each table that has runs a .md, a .csv and its plots.

    reference: the folder of another report, or its report.json. Returns what was done.
    """
    definitions = load_definitions(DEFINITIONS)
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
    metrics = metrics_of(runs)
    rows_of_experiments = build_tables(definitions, metrics, all_runs)
    compared = compare(rows_of_experiments, other, reference) if reference and other else []
    predictable = [run for run in stand_for_experiments(runs) if run.completed and run.record.configs]
    tables = [
        *rows_of_experiments,
        list_of(PREDICTIONS, predictable, metrics),
        list_of(ALL_RUNS, runs, metrics),
    ]
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
    written = f"{in_words(len(runs), 'run')}, {in_words(sum(table.has_runs for table in tables), 'table')}: {index}"
    return "\n".join([written, *compared])


def write_tables(tables: list[Table], output: Path) -> dict[str, list[tuple[Path, str]]]:
    """Write the files of each table that has runs. Returns table name -> its plots, each with what is seen in it."""
    from reporting.plots import draw  # matplotlib takes a second, which --job need not wait for

    images = {}
    for table in tables:
        if table.has_runs:
            images[table.name] = draw(table, output)
            (output / f"{table.name}.md").write_text(markdown(table, images[table.name]), encoding="utf-8")
            (output / f"{table.name}.csv").write_text(comma_separated(table), encoding="utf-8")
    return images


def remove_old(definitions: list[dict], output: Path) -> None:
    """Remove the files of an earlier report: one of a table that no longer has runs would look like a result."""
    (output / NAME).unlink(missing_ok=True)
    for name in ["prediction", *(definition["id"] for definition in definitions)]:
        for path in [*output.glob(f"{name}*.md"), *output.glob(f"{name}*.csv"), *output.glob(f"{name}-*.png")]:
            path.unlink()


def stand_for_experiments(runs: list[Run]) -> list[Run]:
    """Of each experiment the latest completed run, or the latest of any status."""
    by_experiment: dict[str, dict[Run, list[str]]] = {}
    for run in runs:
        by_experiment.setdefault(run.experiment, {})[run] = []
    return list(filter(None, (choose(list(own), own) for own in by_experiment.values())))


def job_table(path: Path) -> str:
    """The baseline table and the memory of one run, for the terminal; a missing value is empty, with its reason."""
    read_record(path)  # or what is wrong with it
    run = read_run(path)
    say_how_to_go_on([run])
    definition = next(table for table in load_definitions(DEFINITIONS) if table["id"] == "baseline")
    evaluations = [f"eval_loss_{n}" for n in range(1, len(run.record.eval) + 1)][:MOST_EPOCHS]
    others = [name for name in definition["columns"] if not name.startswith("eval_loss")]
    if not run.record.settings.em_f1:
        others = [name for name in others if name not in ("exact_match", "f1")]
    columns = [others[0], *evaluations, *others[1:], *MEMORY_COLUMNS]
    definition |= {"columns": columns, "rows": [{"label": "Value", "experiment": run.experiment}]}
    _, lines = lines_of(build_table(definition, {run.experiment: [run]}, metrics_of([run])))
    rows = [line for line in lines if line[-1] != NO_GPU]
    left_out = [f"no GPU: {in_words(len(lines) - len(rows), 'row')} left out"] if len(rows) < len(lines) else []
    output = run.record.output_dir
    saved = output and (run.folder / output / "config.json").exists()
    return "\n".join(
        [
            "",
            f"Baseline summary of {run.job_id} ({run.ended}, {run.record.settings.model_name})",
            "",
            grid(["Metric", "Value", "Note"], rows),
            "",
            *left_out,
            *(f"incomplete: {problem}" for problem in run.problems),
            *(f"does not compare: {override}" for override in run.record.overrides),
            f"model:      {output if saved else 'not saved'}",
            f"run record: {path}",
        ]
    )


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments")
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder for the report")
    parser.add_argument("--all-runs", action="store_true", help="mean and standard deviation over repeats")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="compare with the report in this folder")
    parser.add_argument("--job", type=Path, help="print the tables of this run record and write nothing")
    arguments = parser.parse_args()
    if arguments.job and arguments.reference:
        raise WorkshopError("--reference", "compares whole reports, and --job shows one run", "leave one of them out")
    if arguments.job:
        print(job_table(arguments.job))
        return
    folders = arguments.folders or [Path(os.path.relpath(REPOSITORY / "experiments"))]
    print(write_report(folders, arguments.output, arguments.all_runs, arguments.reference))


if __name__ == "__main__":
    run_program(main)
