"""The workshop's tables and plots, from the records and memory logs of the runs.

python scripts/report.py                                   # all experiments, into report/
python scripts/report.py experiments/deepspeed-multi-gpu   # only the runs below these folders
python scripts/report.py --all-runs -o /tmp/report         # mean and standard deviation over repeats
python scripts/report.py --reference /shared/reference     # next to the numbers of that report
python scripts/report.py --job results/123.json            # one run, in the terminal

Open report/index.html in a browser: it is one file and needs no network.
"""

import argparse
import os
from pathlib import Path

from reporting.one_run import job_table
from reporting.report_folder import write_report
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.paths import REPOSITORY


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
