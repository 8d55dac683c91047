"""Check experiment scripts before they are submitted.

    python scripts/check_experiment.py experiments/baseline/baseline.slurm
    python scripts/check_experiment.py $(git ls-files 'experiments/*.slurm')

Each config file that a script names must be valid, the GPUs and nodes in its name and its folders' must be those of its
#SBATCH lines, and log/ must exist (Slurm opens the log before the job starts). One line per mistake, exit code 2.
With --memory it also warns, on stderr, of what estimate_memory.py finds too large for the GPU (GPU_MEMORY, in GiB, of
the site file) or for --mem. The variables of the site are taken from the environment: submit.sh sets them.
"""

import argparse
import contextlib
import io
import os
import re
import subprocess
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


def own_variables(script: Path) -> dict[str, str]:
    """The environment with the knobs that the experiment itself sets, as bash gives them: `: "${NAME:=value}"`."""
    files = [str(path) for path in (script.parent / "env_vars.sh", script) if path.is_file()]
    command = 'set -a; eval "$(grep -hE \'^(export [A-Z]|: "[$])\' "$@")"; env -0'
    done = subprocess.run(["bash", "-c", command, "bash", *files], capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)


def gpu_memory() -> float:
    """GiB of one GPU, as the site says it; infinite where it does not."""
    text = os.environ.get("GPU_MEMORY") or "inf"
    try:
        return float(text)
    except ValueError:
        fail("GPU_MEMORY", f"{text!r} is no number of GiB", "correct it in the site file, for example 32")


def memory_warnings(script: Path) -> list[str]:
    """What does not fit, by estimate_memory.py, of one GPU and of the memory that the job asks for."""
    from config import parse_command_line
    from estimate_memory import EXTRA_FLAGS, GIB, complete, estimate, mem_option, totals

    text = script.read_text(encoding="utf-8")
    nodes, gpus = directive(text, "nodes"), directive(text, "gpus-per-node")
    command = ["--gpus", str(nodes * gpus), "--nodes", str(nodes)]
    if config := re.search(r'"\$ROOT/((ds|fsdp)_configs/[^"]+)"', text):
        file = str(REPOSITORY / config[1])
        command += ["--deepspeed", file] if config[2] == "ds" else ["--fsdp", "--fsdp_config", file]
    before, said = dict(os.environ), io.StringIO()
    os.environ |= own_variables(script)
    try:
        with contextlib.redirect_stderr(said):
            held = estimate(complete(parse_command_line("", command, EXTRA_FLAGS, gpu=True)))
    except SystemExit:
        return [f"memory is not estimated: {said.getvalue().strip().removeprefix('error: ')}"]
    finally:
        os.environ.clear()
        os.environ |= before
    sizes = totals(held, gpus)
    on_gpu, on_node = (size / GIB for size in sizes)
    own = re.search(r"^#SBATCH --mem=(\w+)", text, re.MULTILINE)
    mem = re.match(r"(\d+)([KMGT]?)", (os.environ.get("SBATCH_MEM_PER_NODE") or (own[1] if own else "")).upper())
    units = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}
    asked = float(mem[1]) * units[mem[2]] if mem else float("inf")
    gpu, warnings = gpu_memory(), []
    if on_gpu > 0.9 * gpu:
        way_out = "lower BATCH_SIZE or MAX_LENGTH, use more GPUs, or offload (docs/memory.md)"
        warnings.append(f"about {on_gpu:.0f} GiB per GPU, and one has {gpu:g}; {way_out}")
    if on_node > asked:
        way_out = f"set SBATCH_MEM_PER_NODE={mem_option(sizes[1], gpus)} (sbatch --mem)"
        warnings.append(f"about {on_node:.0f} GiB per node, and the job asks for {asked:g}; {way_out}")
    return warnings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, nargs="+", help="a .slurm file")
    parser.add_argument("--memory", action="store_true", help="warn of what will not fit")
    arguments, wrong = parser.parse_args(), 0
    for script in arguments.script:
        try:
            check_experiment(script)
        except SystemExit:
            wrong += 1
            continue
        path, root = script.resolve().parent, REPOSITORY / "experiments"
        name = path.relative_to(root) if path.is_relative_to(root) else script
        for warning in memory_warnings(script) if arguments.memory else []:
            print(f"warning: {name}: {warning}", file=sys.stderr)
    sys.exit(BAD_INPUT if wrong else 0)


if __name__ == "__main__":
    main()
