"""Check that the files, folders, make targets and flags in the pages' commands exist.

A `bash` block works on a laptop. A `bash cluster` block needs Slurm or a GPU.
"""

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helpers import REPOSITORY, bash_blocks
from text_checks.common import TEXTS, read, relative_name

OWN_EXPERIMENT = "own/mine"  # the reader's copy of an experiment
# tests/unit/test_docs.py parses the flags of these scripts
PARSED = ("estimate_memory.py", "evaluate.py", "loop.py", "train.py")


class Command(NamedTuple):
    page: Path
    cluster: bool  # True in a `bash cluster` block
    folder: Path
    variables: dict[str, str]
    words: list[str]

    @property
    def without_launcher(self) -> list[str]:
        words = list(itertools.dropwhile(lambda word: word == "srun" or word.startswith("--"), self.words))
        return ["python", *words[2:]] if words[:1] == ["torchrun"] else words


def commands() -> Iterator[Command]:
    """Yield each simple command of the pages, with the folder that its `cd` commands lead to."""
    for page in TEXTS:
        for kind, text in bash_blocks(page):
            here = REPOSITORY
            for line in textwrap.dedent(text).splitlines():
                before = here
                words = shlex.split(line.strip("()") if line.startswith("(") else line, comments=True)
                for is_operator, group in itertools.groupby(words, lambda word: word in ("&&", ";", "|", ">")):
                    command = list(group)
                    variables = {}
                    while command and re.match(r"[A-Z_]+=", command[0]):
                        name, _, value = command.pop(0).partition("=")
                        variables[name] = value
                    if command and not is_operator:
                        yield Command(page, kind.strip() == "cluster", here, variables, command)
                    if command[:1] == ["cd"]:
                        here = (here / command[1]).resolve()
                if line.startswith("("):
                    here = before


def findings() -> Iterator[str]:
    for page, text in TEXTS.items():
        if re.search(r"```bash cluster\n[^`]*```\n\n *```bash\n", text):
            problem = "commands for a cluster stand directly before commands for a laptop"
            yield f'{relative_name(page)}: {problem}; write "On a cluster:" and "On a laptop:" before the blocks'
        if any(re.search(r"\bsbatch\b[^`]*\bscancel\b", block) for _, block in bash_blocks(page)):
            problem = "a block cancels the job that it submits, if somebody pastes it"
            yield f"{relative_name(page)}: {problem}; write scancel into a block of its own"
    for command in commands():
        absent = [f"there is no {name}; write the new name" for name, exists in named_targets(command) if not exists]
        for finding in [*broken_rules(command), *absent]:
            yield f"{relative_name(command.page)}: `{shlex.join(command.words)}`: {finding}"


def broken_rules(command: Command) -> list[str]:
    """Return the rules about clusters and launchers that a command breaks."""
    words, line = command.words, shlex.join(command.words)
    submits = words[0].endswith("submit.sh") and "--dry-run" not in words
    needs_cluster = submits or re.search(r"\b(sbatch|srun|squeue|scancel)\b", words[0])
    torchrun = "torchrun" in words
    broken = {
        "needs a cluster; begin its block with ```bash cluster": needs_cluster and not command.cluster,
        "starts ranks without torchrun; write torchrun": {"scripts/launch.py", "torch.distributed.run"} & set(words),
        "has a <placeholder>, which bash reads as a file; write an example, or a variable of the site file": re.search(
            r"<[a-z][\w ]*>", " ".join(words)
        ),
        "does not begin with the number of ranks; begin with torchrun --nproc_per_node=<number>": torchrun
        and not re.search(r"torchrun --nproc_per_node=\d ", line),
        "torchrun sets one thread and prints a warning; begin with OMP_NUM_THREADS=1": torchrun
        and "OMP_NUM_THREADS" not in command.variables,
        "would also slow down the jobs that follow; write OMP_NUM_THREADS before the command": words[0] == "export"
        and "OMP_NUM_THREADS=" in line,
    }
    return [rule for rule, is_broken in broken.items() if is_broken]


def named_targets(command: Command) -> Iterator[tuple[str, bool]]:
    """Yield each file, folder, target or flag that a command names, with True if it exists."""
    folder, words = command.folder, command.without_launcher
    first, second = (*words, "", "")[:2]
    if first == "cd":
        yield second, (folder / second).is_dir()
    elif first == "make":
        targets = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
        yield from ((f"target {word}", word in targets) for word in words[1:] if "=" not in word)
    elif first in ("sbatch", "bash"):
        scripts = [word for word in words if word.endswith((".slurm", ".sh"))][:1]
        yield from ((script, (folder / script).is_file()) for script in scripts)
    elif first.endswith("submit.sh"):
        experiment = f"experiments/{words[-1]}"
        yield first, (folder / first).is_file()
        yield experiment, words[-1] in ("all", OWN_EXPERIMENT) or (REPOSITORY / experiment).exists()
    elif first.endswith("watch.sh"):
        yield first, (folder / first).is_file()
    elif first == "python" and second.endswith(".py"):
        script = read(folder / second)
        yield second, bool(script)
        for config in re.findall(r"(?:ds|fsdp)_configs/[\w.]+", " ".join(words)):
            yield config, (REPOSITORY / config).is_file()
        if not second.endswith(PARSED):
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            yield from ((f"{flag} in {second}", flag in re.findall(r"--[\w-]+", script)) for flag in flags)
