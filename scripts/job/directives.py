"""Options on the #SBATCH lines of a .slurm file. Jobs, submit.sh, the pages and the tests read them here.

    cd scripts && GPUS_PER_NODE=4 python -m job.directives X.slurm Y.slurm

prints those of these scripts that need more GPUs per node than the site has. submit.sh leaves them out.
"""

import re
import sys
from pathlib import Path

from shared.errors import WorkshopError, run_program, whole_number

OPTION = re.compile(r"""(?<!\S)-(-[\w-]+|\w)(?:[= ]*["']?([^\s"'-][^\s"']*))?""")
LONG_NAMES = {"N": "nodes", "G": "gpus", "J": "job-name"}


def main() -> None:
    limit = whole_number("GPUS_PER_NODE")
    for script in map(Path, sys.argv[1:]):
        if gpus_per_node(read_directives(script)) > limit:
            print(script)


def read_directives(script: Path) -> dict[str, str]:
    """Return the options of a script by their long names. If it gives one twice, the last value counts, as in Slurm."""
    lines = re.findall(r"^#SBATCH (.*?)(?: #.*)?$", script.read_text(errors="replace"), re.MULTILINE)
    return {LONG_NAMES.get(name, name.lstrip("-")): value for name, value in OPTION.findall("\n".join(lines))}


def parse_count(value: str) -> int:
    """Return the number in a value such as 2, a100:2 or 1-2 (the larger number). It is 1 if the value has none."""
    last = re.split("[:-]", value)[-1]
    return int(last) if last.isdecimal() else 1


def limit_hours(limit: str) -> float:
    """Return the hours of a time limit in one of Slurm's forms, such as 20 (minutes), 00:20:00 or 1-12 (days-hours)."""
    days, _, clock = limit.rpartition("-")
    if not days and clock.count(":") < 2:
        clock = f"0:{clock}"
    try:
        return 24 * int(days or 0) + sum(int(part) / 60**place for place, part in enumerate(clock.split(":")))
    except ValueError as error:
        raise WorkshopError("SBATCH_TIMELIMIT", f"{limit!r} is not a time", "write hours:minutes:seconds") from error


def gpus_per_node(asked: dict[str, str]) -> int:
    """Return the number of GPUs per node that a script requests, or 1 if it requests none."""
    gres = re.search(r"\bgpu:([^,]+)", asked.get("gres", ""))
    in_all = parse_count(asked.get("gpus", "")) // parse_count(asked.get("nodes", ""))
    return max(1, parse_count(asked.get("gpus-per-node") or (gres[1] if gres else str(in_all))))


if __name__ == "__main__":
    run_program(main)
