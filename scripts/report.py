"""Write the workshop's tables and plots from the run records and memory logs.

python scripts/report.py                                   # all runs, into report/
python scripts/report.py experiments/deepspeed-multi-gpu   # only the runs below these folders
python scripts/report.py --class /home/*/workshop --watch  # all participants of a class, into report/class.html
python scripts/report.py --all-runs -o /tmp/report         # mean and standard deviation over repeats
python scripts/report.py --reference /shared/reference     # compared with the report in that folder
python scripts/report.py --job 123                         # one run, in the terminal; also results/123.json

Open report/index.html in a browser. The page is one file and needs no network.
"""

import argparse
import os
from pathlib import Path

from records.schema import read_record
from reporting.definitions import RowDefinition, table_definition
from reporting.metrics import MAX_EPOCHS, METRICS, eval_loss
from reporting.render import grid, plural, table_lines
from reporting.report_folder import write_report
from reporting.runs import NO_GPU, add_resume_hints, find_record, read_run
from reporting.tables import build_table
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.paths import REPOSITORY, saved_model


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_class_arguments(parser)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments and results")
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder for the report")
    parser.add_argument("--all-runs", action="store_true", help="show mean and standard deviation over repeats")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="compare with the report in this folder")
    parser.add_argument("--job", help="print the table of the run with this id or record and write nothing")
    arguments = parser.parse_args()
    if check_class_arguments(arguments):
        print(report_class(arguments))
        return
    if arguments.job and arguments.reference:
        raise WorkshopError("--reference", "compares whole reports, and --job shows one run", "leave one of them out")
    # The first steps of README.md run in the repository's folder
    default = [folder for folder in (REPOSITORY / "experiments", REPOSITORY / "results") if folder.is_dir()]
    if arguments.job:
        print(job_table(find_job(arguments.job, default)))
    else:
        folders = arguments.folders or [Path(os.path.relpath(folder)) for folder in default]
        print(write_report(folders, arguments.output, arguments.all_runs, arguments.reference))


def find_job(job: str, folders: list[Path]) -> Path:
    """Return the path of a run record. job: this path, or the id of a run in the current folder or these folders."""
    if "/" in job or job.endswith(".json") or os.path.isfile(job):
        return Path(job)
    return find_record(job, [Path("results"), *folders])


def job_table(path: Path) -> str:
    """Return the baseline table and the memory of one run. A missing value is an empty cell with the reason."""
    read_record(path)  # raises WorkshopError if the file is not a run record
    run = read_run(path)
    add_resume_hints([run])
    definition = table_definition("baseline")
    evaluations = {f"eval_loss_{n}": eval_loss(n) for n in range(1, len(run.record.eval) + 1)[-MAX_EPOCHS:]}
    METRICS.update(evaluations)  # otherwise METRICS has only the first epochs, which tables.yaml can name
    first, *others = [name for name in definition.columns if not name.startswith("eval_loss")]
    if not run.record.settings.em_f1:
        others = [name for name in others if name not in ("exact_match", "f1")]
    columns = [first, *evaluations, *others, "peak_gpu", "low_gpu", "mean_gpu", "peak_cpu", "peak_process", "mean_cpu"]
    rows = [RowDefinition(label="Value", experiment=run.experiment)]
    definition = definition.model_copy(update={"columns": columns, "rows": rows})
    heads, lines = table_lines(build_table(definition, {run.experiment: [run]}))
    shown = [line for line in lines if line[2:] != [NO_GPU]]
    left_out = {"earlier evaluations": len(run.record.eval) - len(evaluations), "no GPU": len(lines) - len(shown)}
    output = run.record.output_dir
    saved = saved_model(run.folder / output) if output else None
    return "\n".join(
        [
            "",
            f"Summary of {run.job_id}: {run.experiment} ({run.outcome}, {run.record.settings.model_name})",
            "",
            grid(["Metric", "Value", *heads[2:]], shown),
            "",
            *(f"{reason}: {plural(count, 'row')} left out" for reason, count in left_out.items() if count),
            *(f"incomplete: {problem}" for problem in run.problems),
            *(f"not comparable: {override}" for override in run.record.overrides),
            f"model:      {str(saved).removeprefix(f'{run.folder}/') if saved else 'not saved'}",
            f"run record: {path}",
        ]
    )


def add_class_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the class at a glance")
    group.add_argument("--class", dest="clones", nargs="+", type=Path, metavar="FOLDER", help="clones of participants")
    group.add_argument("--experiments", nargs="+", metavar="NAME", help="columns; default: those of the afternoon")
    group.add_argument("--numbers", action="store_true", help="show participants by number instead of by name")
    group.add_argument("--watch", action="store_true", help="rewrite the page every 10 seconds until Ctrl-C")


def check_class_arguments(arguments: argparse.Namespace) -> bool:
    """Return True if the page of a class is wanted. Raises WorkshopError for flags that do not go together."""
    own = {name: getattr(arguments, name) for name in ("experiments", "numbers", "watch")}
    others = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in ("job", "reference", "all_runs")}
    others["FOLDER"] = arguments.folders
    if arguments.clones:
        for flag in (flag for flag, value in others.items() if value):
            raise WorkshopError(flag, "cannot be used with --class, which writes a page of its own", "leave it out")
    else:
        for name in (name for name, value in own.items() if value):
            raise WorkshopError(f"--{name}", "changes only the page of --class", "add --class and the clones")
    return bool(arguments.clones)


def report_class(arguments: argparse.Namespace) -> str:
    from reporting.classroom_folder import write_class
    from reporting.classroom_runs import afternoon_experiments, select_experiments

    experiments = select_experiments(arguments.experiments) if arguments.experiments else afternoon_experiments()
    return write_class(arguments.clones, arguments.output, experiments, arguments.numbers, arguments.watch)


if __name__ == "__main__":
    run_program(main)
