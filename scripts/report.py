"""Write the workshop's tables and plots from the run records and memory logs.

python scripts/report.py                                   # all runs, into report/
python scripts/report.py experiments/deepspeed-multi-gpu   # only the runs below these folders
python scripts/report.py --class /home/*/workshop --watch  # all participants of a class, into report/class.html
python scripts/report.py --people 20 --gpus 16             # the jobs, GPUs and hours of such a class, in the terminal
python scripts/report.py --all-runs -o /tmp/report         # mean and standard deviation over repeats
python scripts/report.py --reference /shared/reference     # compared with the report in that folder
python scripts/report.py --job 123                         # one run, in the terminal; also results/123.json

Open report/index.html in a browser. The page is one file and needs no network.
"""

import argparse
import os
from pathlib import Path

from config import COUNT
from records.schema import read_record
from reporting.classroom_plan import ClassPlan
from reporting.definitions import RowDefinition, table_definition
from reporting.metrics import MAX_EPOCHS, METRICS, eval_loss
from reporting.render import grid, plural, table_lines
from reporting.report_folder import write_report
from reporting.runs import NO_GPU, add_resume_hints, find_record, find_runs, read_run
from reporting.tables import build_table
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.paths import REPOSITORY, saved_model

ONLY_WITH = {"--class": ["--experiments", "--numbers", "--watch"], "--people": ["--gpus", "--agenda"]}
REPORT_ONLY = ["--reference", "--all-runs"]
# Each of these flags prints or writes something of its own, and cannot be combined with the flags in its list
EXCLUDES = {
    "--class": ["--people", "--job", *REPORT_ONLY, "FOLDER"],
    "--people": ["--job", *REPORT_ONLY],
    "--job": REPORT_ONLY,
}


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_class_arguments(parser)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments and results")
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder for the report")
    parser.add_argument("--all-runs", action="store_true", help="show mean and standard deviation over repeats")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="compare with the report in this folder")
    parser.add_argument("--job", help="print the table of the run with this id or record and write nothing")
    arguments = parser.parse_args()
    check_flags(arguments)
    # The first steps of README.md run in the repository's folder
    default = [folder for folder in (REPOSITORY / "experiments", REPOSITORY / "results") if folder.is_dir()]
    folders = arguments.folders or [Path(os.path.relpath(folder)) for folder in default]
    if arguments.clones:
        print(report_class(arguments))
    elif arguments.people:
        plan = ClassPlan(arguments.people, arguments.gpus or 16, arguments.agenda or "afternoon")
        print(plan.describe(find_runs(folders)))
    elif arguments.job:
        job = arguments.job
        is_path = "/" in job or job.endswith(".json") or os.path.isfile(job)
        print(job_table(Path(job) if is_path else find_record(job, [Path("results"), *default])))
    else:
        print(write_report(folders, arguments.output, arguments.all_runs, arguments.reference))


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
    saved = saved_model(run.output) if run.output else None
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
            f"model:      {saved or 'not saved'}",
            f"run record: {path}",
        ]
    )


def add_class_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the class at a glance")
    group.add_argument("--class", dest="clones", nargs="+", type=Path, metavar="FOLDER", help="clones of participants")
    group.add_argument("--experiments", nargs="+", metavar="NAME", help="columns; default: those of the afternoon")
    group.add_argument("--numbers", action="store_true", help="show participants by number instead of by name")
    group.add_argument("--watch", action="store_true", help="rewrite the page every 10 seconds until Ctrl-C")
    group = parser.add_argument_group("the class in numbers")
    group.add_argument(
        "--people",
        type=COUNT.whole_number,
        help="print what so many people submit and need, and how long your jobs ran",
    )
    group.add_argument("--gpus", type=COUNT.whole_number, help="GPUs that the class has (16)")
    group.add_argument("--agenda", choices=["afternoon", "day", "two-days"], help="(afternoon)")


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise WorkshopError for flags that do not go together."""
    names = {"clones": "--class", "folders": "FOLDER"}
    given = [names.get(name, f"--{name.replace('_', '-')}") for name, value in vars(arguments).items() if value]
    for mode, flags in ONLY_WITH.items():
        for flag in (flag for flag in flags if flag in given and mode not in given):
            raise WorkshopError(flag, f"changes only the output of {mode}", f"add {mode}")
    for mode, flags in EXCLUDES.items():
        for flag in (flag for flag in flags if flag in given and mode in given):
            raise WorkshopError(
                flag, f"cannot be used with {mode}, which has an output of its own", "leave one of them out"
            )


def report_class(arguments: argparse.Namespace) -> str:
    from reporting.classroom_folder import write_class
    from reporting.classroom_runs import select_experiments

    experiments = select_experiments(arguments.experiments or ClassPlan().experiments(shared=False))
    return write_class(arguments.clones, arguments.output, experiments, arguments.numbers, arguments.watch)


if __name__ == "__main__":
    run_program(main)
