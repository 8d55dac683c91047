"""Check experiment scripts before they are submitted.

    python scripts/check_experiment.py experiments/baseline/baseline.slurm
    python scripts/check_experiment.py $(git ls-files 'experiments/*.slurm')

Each config file that a script names must be valid, the GPUs and nodes in its name and its folders' must be those of its
#SBATCH lines, and log/ must exist (Slurm opens the log before the job starts). One line per mistake, exit code 2.
"""

import argparse
import re
import sys
from pathlib import Path

from ds_config import check_ds_config
from errors import BAD_INPUT, fail
from fsdp_config import check_fsdp_file

REPOSITORY = Path(__file__).resolve().parent.parent


def directive(text: str, name: str) -> int | None:
    """Number of the line ``#SBATCH --name=N``."""
    found = re.search(rf"^#SBATCH --{name}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def check_experiment(script: Path) -> None:
    """Raises SystemExit(2), with one line on stderr, for the first mistake."""
    if not script.is_file():
        fail(script, "there is no such experiment", "see the folders below experiments/")
    text = script.read_text(encoding="utf-8")
    nodes, gpus = directive(text, "nodes"), directive(text, "gpus-per-node")
    if nodes is None or gpus is None:
        fail(script, "has no #SBATCH --nodes=N or --gpus-per-node=N", "state both: the number of ranks comes from them")
    path, root = script.resolve(), REPOSITORY / "experiments"
    for name in path.relative_to(root).parts if path.is_relative_to(root) else path.parts[-2:]:
        for number, unit in re.findall(r"(?:^|_)(\d+)_(gpus|nodes)(?=[_.]|$)", name):
            stated = {"gpus": nodes * gpus, "nodes": nodes}[unit]
            if stated != int(number):
                way_out = "correct the name or the directives"
                fail(script, f"{name} says {number} {unit}, the #SBATCH lines say {stated}", way_out)
    if not (script.parent / "log").is_dir():
        fail(script, "there is no log/ beside it", "create it: Slurm fails a job whose log it cannot open")
    for config in re.findall(r'"\$ROOT/(ds_configs/[^"]+)"', text):
        check_ds_config(str(REPOSITORY / config))
    for config in re.findall(r'"\$ROOT/(fsdp_configs/[^"]+)"', text):
        content = check_fsdp_file(str(REPOSITORY / config))
        sizes = content.get("dp_shard_size", "auto"), content.get("dp_replicate_size", "auto")
        if "auto" not in sizes and sizes[0] * sizes[1] != nodes * gpus:
            fail(config, f"is for {sizes[0] * sizes[1]} ranks, {script} starts {nodes * gpus}", "use another config")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, nargs="+", help="a .slurm file")
    wrong = 0
    for script in parser.parse_args().script:
        try:
            check_experiment(script)
        except SystemExit:
            wrong += 1
    sys.exit(BAD_INPUT if wrong else 0)


if __name__ == "__main__":
    main()
