"""Check experiment scripts before they are submitted.

    python scripts/check_experiment.py experiments/baseline/baseline.slurm
    python scripts/check_experiment.py $(git ls-files 'experiments/*.slurm')

Each config file that a script names must be valid, the GPUs and nodes in its name and its folders' must be those of its
#SBATCH lines, and log/ must exist (Slurm opens the log before the job starts). One line per mistake, exit code 2.
With --memory it also warns, on stderr, of what estimate_memory.py finds too large for the GPU (GPU_MEMORY, in GiB, of
the site file) or for --mem. The variables of the site are taken from the environment: submit.sh sets them.
"""

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from errors import BAD_INPUT, OneLineErrors, WorkshopError, report, run_program
from parallel.ds_config import check_ds_config
from parallel.fsdp_config import check_fsdp_file
from paths import EXPERIMENTS, REPOSITORY

# A word that sets a variable unless it is set: ${NAME:=value}
UNLESS_SET = re.compile(r"\$\{(\w+):?=(.*)\}")
# ${NAME:-value}, ${NAME} and $NAME, of which no other stands within
REFERENCE = re.compile(r"\$(?:\{(\w+)(?::?-([^${}]*))?\}|(\w+))")
GIB_PER_UNIT = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}  # of sbatch --mem


def directive(text: str, name: str) -> int | None:
    """Number of the line ``#SBATCH --name=N``."""
    found = re.search(rf"^#SBATCH --{name}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def nodes_and_gpus(script: Path, text: str) -> tuple[int, int]:
    """Nodes of an experiment, and GPUs per node."""
    nodes = directive(text, "nodes")
    gpus = directive(text, "gpus-per-node")
    if nodes is None or gpus is None:
        what = "has no #SBATCH --nodes=N or --gpus-per-node=N"
        raise WorkshopError(script, what, "state both: the number of ranks comes from them")
    return nodes, gpus


def check_experiment(script: Path) -> None:
    """Raises WorkshopError (exit code 2) for the first mistake."""
    if not script.is_file():
        raise WorkshopError(script, "there is no such experiment", "see the folders below experiments/")
    text = script.read_text(encoding="utf-8")
    nodes, gpus = nodes_and_gpus(script, text)
    check_names(script, nodes, gpus)
    if not (script.parent / "log").is_dir():
        way_out = "create it: Slurm fails a job whose log it cannot open"
        raise WorkshopError(script, "there is no log/ beside it", way_out)
    for config in re.findall(r'"\$ROOT/(ds_configs/[^"]+)"', text):
        check_ds_config(str(REPOSITORY / config))
    for config in re.findall(r'"\$ROOT/(fsdp_configs/[^"]+)"', text):
        content = check_fsdp_file(str(REPOSITORY / config))
        shards = content.get("dp_shard_size", "auto")
        replicas = content.get("dp_replicate_size", "auto")
        if "auto" not in (shards, replicas) and shards * replicas != nodes * gpus:
            what = f"is for {shards * replicas} ranks, {script} starts {nodes * gpus}"
            raise WorkshopError(config, what, "use another config")


def check_names(script: Path, nodes: int, gpus: int) -> None:
    """Names such as ``4_gpus`` and ``deepspeed_2_nodes.slurm`` must say what the #SBATCH lines say."""
    path = script.resolve()
    names = path.relative_to(EXPERIMENTS).parts if path.is_relative_to(EXPERIMENTS) else path.parts[-2:]
    stated = {"gpus": nodes * gpus, "nodes": nodes}
    for name in names:
        for number, unit in re.findall(r"(?:^|_)(\d+)_(gpus|nodes)(?=[_.]|$)", name):
            if stated[unit] != int(number):
                what = f"{name} says {number} {unit}, the #SBATCH lines say {stated[unit]}"
                raise WorkshopError(script, what, "correct the name or the directives")


def knobs_of(script: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with the variables that env_vars.sh and the experiment itself set as bash would set them.

    Raises WorkshopError (exit code 2) for a knob that is the output of a command, which only the job will run.
    """
    variables = {"ROOT": str(REPOSITORY), **environment}
    for path in (script.parent / "env_vars.sh", script):
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            for name, value in assignments(line, variables):
                if "$(" in value or "`" in value:
                    what = f"is {value}, which only the job can tell"
                    raise WorkshopError(f"{path}: {name}", what, "write its value, or give it when you submit")
                variables[name] = expanded(value, variables)
    return variables


def assignments(line: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and value, as it stands there, of each assignment of a line that takes effect.

    These are `: "${NAME:=value}"` where the variable is not set, and `export NAME=value`.
    """
    for words in commands(line):
        for word in words[1:]:
            found = UNLESS_SET.fullmatch(word)
            if words[0] == ":" and found and not variables.get(found[1]):
                yield found[1], found[2]
            elif words[0] == "export" and "=" in word:
                name, _, value = word.partition("=")
                yield name, value


def commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line that sets variables, without quotes and comments."""
    if not line.startswith((": ", "export ")):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        return
    for separator, group in itertools.groupby(words, lambda word: set(word) <= {";", "&"}):
        if not separator:
            yield list(group)


def expanded(value: str, variables: Mapping[str, str]) -> str:
    """The value with the variables that it refers to put in, from the inside out, and ~ as bash takes it."""

    def content(found: re.Match) -> str:
        name = found[1] or found[3]
        default = found[2] or ""
        return (variables.get(name) or default).replace("$", "\0")  # a dollar of the content refers to nothing

    while REFERENCE.search(value):
        value = REFERENCE.sub(content, value)
    value = value.replace("\0", "$")
    return str(Path(value).expanduser()) if value.startswith("~") else value


def gpu_memory() -> float:
    """GiB of one GPU, as the site says it; infinite where it does not."""
    text = os.environ.get("GPU_MEMORY") or "inf"
    try:
        return float(text)
    except ValueError:
        way_out = "correct it in the site file, for example 32"
        raise WorkshopError("GPU_MEMORY", f"{text!r} is no number of GiB", way_out) from None


def requested_memory(text: str) -> float:
    """GiB per node that the job asks for, infinite where it does not say."""
    own = re.search(r"^#SBATCH --mem=(\w+)", text, re.MULTILINE)
    option = os.environ.get("SBATCH_MEM_PER_NODE") or (own[1] if own else "")
    found = re.match(r"(\d+)([KMGT]?)", option.upper())
    return float(found[1]) * GIB_PER_UNIT[found[2]] if found else float("inf")


def memory_warnings(script: Path) -> list[str]:
    """What does not fit, by estimate_memory.py, of one GPU and of the memory that the job asks for."""
    from estimate_memory import FITS, GIB, estimate, mem_option, read_options, totals

    text = script.read_text(encoding="utf-8")
    nodes, gpus = nodes_and_gpus(script, text)
    command = ["--gpus", str(nodes * gpus), "--nodes", str(nodes)]
    if config := re.search(r'"\$ROOT/((ds|fsdp)_configs/[^"]+)"', text):
        file = str(REPOSITORY / config[1])
        command += ["--deepspeed", file] if config[2] == "ds" else ["--fsdp", "--fsdp_config", file]
    try:
        held = estimate(read_options(command, environment=knobs_of(script, os.environ)))
    except WorkshopError as error:
        return [f"memory is not estimated: {error}"]
    gpu_bytes, node_bytes = totals(held, gpus)
    needed_per_gpu = gpu_bytes / GIB
    needed_per_node = node_bytes / GIB
    there = gpu_memory()
    requested = requested_memory(text)
    warnings = []
    if needed_per_gpu > FITS * there:
        way_out = "lower BATCH_SIZE or MAX_LENGTH, use more GPUs, or offload (docs/memory.md)"
        warnings.append(f"about {needed_per_gpu:.0f} GiB per GPU, and one has {there:g}; {way_out}")
    if needed_per_node > requested:
        way_out = f"set SBATCH_MEM_PER_NODE={mem_option(node_bytes, gpus)} (sbatch --mem)"
        warnings.append(f"about {needed_per_node:.0f} GiB per node, and the job asks for {requested:g}; {way_out}")
    return warnings


def short_name(script: Path) -> object:
    """The experiment's folder below experiments/, by which submit.sh takes it."""
    folder = script.resolve().parent
    return folder.relative_to(EXPERIMENTS) if folder.is_relative_to(EXPERIMENTS) else script


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, nargs="+", help="a .slurm file")
    parser.add_argument("--memory", action="store_true", help="warn of what will not fit")
    arguments = parser.parse_args()
    wrong = 0
    for script in arguments.script:
        try:
            check_experiment(script)
        except WorkshopError as error:
            report(error)
            wrong += 1
            continue
        if arguments.memory:
            for warning in memory_warnings(script):
                print(f"warning: {short_name(script)}: {warning}", file=sys.stderr)
    sys.exit(BAD_INPUT if wrong else 0)


if __name__ == "__main__":
    run_program(main)
