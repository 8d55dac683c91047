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

from errors import OneLineErrors, WorkshopError, run_program
from paths import REPOSITORY
from reporting.memory_logs import logs_of, read_cpu_log, read_gpu_log
from reporting.metrics import MOST_EPOCHS, Cell
from reporting.page import GENERATOR, page
from reporting.reference import NAME, compare, read_reference, write_numbers
from reporting.render import comma_separated, grid, lines_of, markdown, plain
from reporting.runs import NO_RECORD, Run, find_runs, read_run
from reporting.tables import Table, build_table, build_tables, chosen, load_definitions

DEFINITIONS = REPOSITORY / "experiments" / "tables.yaml"
PREDICTION_COLUMNS = [
    *("gpus", "estimated_samples_per_second", "steady_samples_per_second", "difference_samples_per_second"),
    *("mfu", "step_compute", "step_optimizer", "step_communication", "step_rest"),
    *("estimated_gpu", "peak_gpu", "difference_gpu", "estimated_cpu", "peak_cpu", "difference_cpu"),
]
RUN_COLUMNS = ["model", "gpus", "runtime", "samples_per_second", "train_loss", "eval_loss", "peak_gpu", "peak_cpu"]


def write_report(folders: list[Path], output: Path, all_runs: bool, reference: Path | None = None) -> str:
    """Write index.html, report.json, and for each table that has runs a .md, a .csv and its plots.

    reference: the folder of another report, or its report.json. Returns what was done.
    """
    definitions = load_definitions(DEFINITIONS)
    for folder in folders:
        if not folder.is_dir():
            raise WorkshopError(folder, "there is no such folder", "give folders of experiments")
    if output.is_dir() and any(output.iterdir()) and GENERATOR not in read_if_there(output / "index.html"):
        raise WorkshopError(output, "holds files that are no report", "give a new folder with -o")
    other = read_reference(reference, output) if reference else None
    runs = find_runs(folders)
    if not runs:
        raise WorkshopError(
            " ".join(map(str, folders)), "no runs below it", "run an experiment first, or give another folder"
        )
    rows_of_experiments = build_tables(definitions, runs, all_runs)
    compared = compare(rows_of_experiments, other, reference) if reference and other else []
    tables = [*rows_of_experiments, prediction_table(runs), run_table(runs)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_old(definitions, output)
        images = write_tables(tables, output)
        summary = (
            "Means over the completed runs that compare with the latest one, ± standard deviation (number of runs); "
            "plots show the latest one."
            if all_runs
            else "Each row shows the latest completed run of its experiment."
        )
        html = page(tables, runs, images, [summary, *compared])
        (output / "index.html").write_text(html, encoding="utf-8")
        write_numbers(rows_of_experiments, output)
    except OSError as error:
        raise WorkshopError(
            error.filename or output, f"cannot be written ({error.strerror})", "give another folder with -o"
        ) from error
    written = f"{len(runs)} runs, {sum(table.has_runs for table in tables)} tables: {output / 'index.html'}"
    return "\n".join([written, *compared])


def read_if_there(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


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


def prediction_table(runs: list[Run]) -> Table:
    """What the runs predicted of themselves, and what was measured: of each experiment the run that stands for it."""
    definition: dict = {"id": "prediction", "title": "Predictions of all experiments", "columns": PREDICTION_COLUMNS}
    definition["question"] = "How far off are the predictions of time and memory, and where did the time go?"
    definition["note"] = (
        "Measured samples/s are those of the steps alone. Percentages are parts of the measured step: MFU is what the "
        "model needs at the hardware's peak; forward and backward, optimizer and communication are "
        "predicted; the rest is what the step took beyond them (less than 0: it was faster). Measured CPU memory is "
        "that of all processes, with the launcher of several ranks, which the estimate leaves out."
    )
    definition["plots"] = ["prediction"]
    by_experiment: dict[str, list[Run]] = {}
    for run in runs:
        if run.completed and run.record.estimate != NO_RECORD.estimate:
            by_experiment.setdefault(run.experiment, []).append(run)
    return one_by_one(definition, [stands for own in by_experiment.values() if (stands := chosen(own))])


def run_table(runs: list[Run]) -> Table:
    """Every run that was found, oldest first, with its GPU-hours."""
    definition: dict = {"id": "runs", "title": "All runs", "columns": [*RUN_COLUMNS, "gpu_hours"]}
    definition["question"] = "What ran, how did it end, and what did it cost?"
    definition["note"] = (
        "GPU-hours: GPUs of the job x time from the run record's start to its end, start-up left out; of a resumed job "
        "those of all its parts."
    )
    return one_by_one(definition, runs)


def one_by_one(definition: dict, runs: list[Run]) -> Table:
    """A table with a row for each run, which are not compared with one another."""
    definition = {"rows": []} | definition
    table = build_table(definition, {}, all_runs=False)
    for run in runs:
        one = definition | {"rows": [{"label": run.experiment, "experiment": run.experiment}]}
        table.rows += build_table(one, {run.experiment: [run]}, all_runs=False).rows
    return table


def job_tables(path: Path) -> str:
    """The baseline summary and the memory of one run, for the terminal."""
    run = read_run(path)
    if not run.has_record:
        raise WorkshopError(path, run.problems[0].removeprefix(f"{path}: "), "give results/<job_id>.json of a run")
    hours, why = run.gpu_hours()
    rows = [*summary_rows(run), ["GPU-hours", Cell(hours).text, why], *rows_of_logs(run)]
    status = f"{run.status}: {run.status_note}" if run.status_note else run.status
    problems = [problem for problem in run.problems if problem not in (run.gpu.reason, run.cpu.reason)]
    output = run.record.output_dir
    saved = output and os.path.exists(run.folder / output / "config.json")
    return "\n".join(
        [
            "",
            plain(f"Baseline summary of {run.job_id} ({status}, {run.model})"),
            "",
            grid(["Metric", "Value", "Note"], rows),
            "",
            *(plain(f"incomplete: {problem}") for problem in problems),
            *map(plain, run.notes),
            plain(f"model:      {output if saved else 'not saved'}"),
            plain(f"run record: {path}"),
        ]
    )


def summary_rows(run: Run) -> list[list[str]]:
    """Metric, value and note of the workshop's baseline table; a missing value is empty, with its reason."""
    definition = next(table for table in load_definitions(DEFINITIONS) if table["id"] == "baseline")
    evaluations = [f"eval_loss_{n}" for n in range(1, len(run.record.eval) + 1)][:MOST_EPOCHS]
    others = [name for name in definition["columns"] if not name.startswith("eval_loss") and name != "gpu_hours"]
    if not run.record.settings.em_f1:
        others = [name for name in others if name not in ("exact_match", "f1")]
    definition |= {"columns": [others[0], *evaluations, *others[1:]], "rows": [{"label": "Value", "experiment": ""}]}
    return lines_of(build_table(definition, {"": [run]}, all_runs=False))[1]


def rows_of_logs(run: Run) -> list[list[str]]:
    """Metric, value in MiB and note; one block per GPU, or an empty value with its reason."""
    rows = []
    gpu_logs, cpu_logs = logs_of(run.folder, run.job_id)
    for kind, paths, read, memory in (
        ("GPU", gpu_logs, read_gpu_log, run.gpu),
        ("CPU", cpu_logs, read_cpu_log, run.cpu),
    ):
        logs = [read(path) for path in paths]
        for log, name in ((each, name) for each in logs for name in each.names()):
            series = "CPU" if kind == "CPU" else f"GPU {name}"
            values = {"peak": log.peak(name), "minimum": log.minimum(name), "mean": log.mean(name)}
            samples = f"{len(log.samples[name])} samples in {log.path.name}"
            note = "; ".join(filter(None, [samples, memory.reason]))
            rows += [[f"{series} memory, {which} (MiB)", Cell(v).text, note] for which, v in values.items()]
        if not any(log.samples for log in logs):
            rows.append([f"{kind} memory, peak (MiB)", "", memory.reason])
    return rows


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
        print(job_tables(arguments.job))
        return
    folders = arguments.folders or [Path(os.path.relpath(REPOSITORY / "experiments"))]
    print(write_report(folders, arguments.output, arguments.all_runs, arguments.reference))


if __name__ == "__main__":
    run_program(main)
