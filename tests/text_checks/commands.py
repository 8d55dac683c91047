"""The commands of the pages: their files, folders, make targets and flags exist.

A block of `bash` works on a laptop. A block of `bash cluster` needs Slurm or a GPU.
"""

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helpers import REPOSITORY, bash_blocks
from text_checks.common import TEXTS, name_of, read

OWN_EXPERIMENT = "own/mine"  # the reader's copy of an experiment
PARSED = ("estimate_memory.py", "evaluate.py", "train.py")  # tests/unit/test_docs.py parses their flags


class Command(NamedTuple):
    page: Path
    cluster: bool  # its block needs a cluster
    folder: Path
    variables: dict[str, str]
    words: list[str]

    @property
    def without_launcher(self) -> list[str]:
        words = list(itertools.dropwhile(lambda word: word == "srun" or word.startswith("--"), self.words))
        return ["python", *words[2:]] if words[:1] == ["torchrun"] else words


def commands() -> Iterator[Command]:
    """Yield each simple command of the pages, in the folder to which `cd` leads."""
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
    for command in commands():
        for finding in [*launch(command), *target(command)]:
            yield f"{name_of(command.page)}: `{shlex.join(command.words)}`: {finding}"


def launch(command: Command) -> Iterator[str]:
    """Check where a command runs and how it starts ranks."""
    words = command.words
    submits = words[0].endswith("submit.sh") and "--dry-run" not in words
    if (submits or re.search(r"\b(sbatch|srun|squeue|scancel)\b", words[0])) and not command.cluster:
        yield "needs a cluster; begin its block with ```bash cluster"
    if {"scripts/launch.py", "torch.distributed.run"} & set(words):
        yield "starts ranks in its own way; write torchrun"
    if "torchrun" in words:
        if not re.fullmatch(r"--nproc_per_node=\d", words[words.index("torchrun") + 1]):
            yield "torchrun does not begin with the number of ranks; write --nproc_per_node=<number> first"
        if "OMP_NUM_THREADS=" not in TEXTS[command.page]:
            yield "torchrun sets one thread and prints a warning; set OMP_NUM_THREADS in this page"


def target(command: Command) -> Iterator[str]:
    """Check that what a command starts exists, and knows its flags."""
    words = command.without_launcher
    if len(words) < 2:
        return
    if words[0] == "cd":
        if not (command.folder / words[1]).is_dir():
            yield "there is no such folder; write its new name"
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
        for word in words[1:]:
            if "=" not in word and word not in targets:
                yield f"Makefile has no target {word}; its targets are {', '.join(targets)}"
    elif words[0] in ("sbatch", "bash"):
        for script in [word for word in words[1:] if word.endswith((".slurm", ".sh"))][:1]:
            if not (command.folder / script).is_file():
                yield f"there is no {script} in this folder; write its new name"
    elif words[0].endswith("submit.sh"):
        if not (command.folder / words[0]).is_file():
            yield f"there is no {words[0]} in this folder; write its path from here"
        if words[-1] not in ("all", OWN_EXPERIMENT) and not (REPOSITORY / "experiments" / words[-1]).exists():
            yield f"there is no experiments/{words[-1]}; write its new name"
    elif words[0] == "python" and words[1].endswith(".py"):
        yield from python(command.folder / words[1], words[2:])


def python(script: Path, words: list[str]) -> Iterator[str]:
    for config in re.findall(r"(?:ds|fsdp)_configs/[\w.]+", " ".join(words)):
        if not (REPOSITORY / config).is_file():
            yield f"there is no {config}; write its new name"
    if not script.is_file():
        yield f"there is no {script.name} in this folder; write its new name"
    elif script.name not in PARSED:
        known = re.findall(r"--[\w-]+", script.read_text(encoding="utf-8"))
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if flag not in known:
                yield f"{script.name} has no flag {flag}; its flags are {', '.join(sorted(set(known)))}"
