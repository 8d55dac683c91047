"""The catalogue of faults: what is done to a run, and what must be seen.

    PYTHONPATH=scripts:tests:tests/commands python tests/faults/table.py      # as Markdown, with counts

A case is a row of `refused`, where bad input must end with one line, or a function under `case`, which does the thing
on a `bench.Bench` and looks at what is left. Each takes a second or two and runs in `make test`, unless `slow` says why
it cannot; `make test-faults` runs all.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench import Bench

GROUPS = {
    "command line": "flags and their values",
    "environment": "variables of knobs and launchers",
    "configs": "DeepSpeed and FSDP files",
    "data": "SQuAD files",
    "model folder": "a model and its tokenizer on disk",
    "output": "folders and disks that are written to",
    "stdout": "where the log goes",
    "kill": "SIGKILL at a moment",
    "stop": "signals that ask for an end",
    "checkpoint": "what a run resumes from",
    "record": "the run record, and two runs of one job",
    "report": "what the report reads",
    "logs": "memory logs",
    "job": "an experiment's script, without Slurm",
    "ranks": "several processes, and the network between them",
    "training": "a training that goes wrong by itself",
    "secrets": "keys and tokens",
}


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    done: str
    seen: str
    act: Callable[["Bench"], None]
    slow: str = ""  # why it is not part of `make test`


CASES: list[Case] = []


def case(group: str, name: str, done: str, seen: str, slow: str = "") -> Callable:
    """Makes a function of the bench a case."""

    def add(act: Callable[["Bench"], None]) -> Callable[["Bench"], None]:
        CASES.append(Case(group, name, done, seen, act, slow))
        return act

    return add


def refused(
    group: str,
    name: str,
    done: str,
    line: str,
    *words: object,
    code: int = 2,
    files: Mapping[str, str | bytes] | None = None,
    slow: str = "",
    **options: object,
) -> None:
    """A case whose run must end with this error line ("..." stands for anything) and write nothing.

    words: of the command line; files: what lies in the folder; options: of `Bench.start`, variables among them.
    """

    def act(bench: "Bench") -> None:
        for path, content in (files or {}).items():
            bench.write(path, content)
        bench.refuses(line, *words, code=code, **options)

    CASES.append(Case(group, name, done, f"exit {code}: {line}", act, slow))


def load() -> list[Case]:
    """All cases, in the order of the groups."""
    for module in ("inputs", "files", "checkpoints", "reading", "jobs", "processes"):
        importlib.import_module(f"cases_{module}")
    return sorted(CASES, key=lambda each: list(GROUPS).index(each.group))


def counts(cases: list[Case]) -> str:
    """How many there are of each group, for docs/reliability.md."""
    lines = [f"{len(cases)} cases, {sum(not each.slow for each in cases)} of them in `make test`.", ""]
    lines += ["| Group | Cases | What it is about |", "| --- | --- | --- |"]
    for group, text in GROUPS.items():
        if count := sum(each.group == group for each in cases):
            lines.append(f"| {group} | {count} | {text} |")
    return "\n".join(lines) + "\n"


def rows(cases: list[Case]) -> str:
    """Each case: what is done, and what must be seen."""
    lines = ["| Group | Done | Seen |", "| --- | --- | --- |"]
    lines += [f"| {each.group} | {cell(each.done)} | {cell(each.seen)} |" for each in cases]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    every_case = importlib.import_module("table").load()
    print(counts(every_case))
    print(rows(every_case), end="")
