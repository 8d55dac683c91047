"""The kinds of training data. The first one that recognises the columns of a file reads it."""

from typing import Any

from shared.errors import WorkshopError, did_you_mean
from tasks.chat import CHAT
from tasks.completion import COMPLETION
from tasks.passage import PASSAGE
from tasks.task import Columns, Task
from tasks.text import TEXT

TASKS = (CHAT, PASSAGE, COMPLETION, TEXT)
TRAINED_ON = "trained_on"  # the field of a saved model's config.json with the name of its kind of data


def choose_task(path: str, names: list[str], given: str | None, free: bool, cells: Any) -> tuple[Task, Columns]:
    """Return the kind of a file, and the columns to read: the given ones, or else those with usual names.

    given: names, separated by commas: of the passage, the question and its answers; of the prompt and the completion;
    or of the messages or the text. cells: the first row. Raise WorkshopError (exit code 2) if no kind fits.
    """
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise WorkshopError(path, f"two columns have the name {repeated[0]}", "give one of them another name")
    if given:
        wanted = [name.strip() for name in given.split(",")]
        for name in wanted:
            if name not in names:
                remedy = did_you_mean(name, names, f"its columns are {', '.join(names)}")
                raise WorkshopError("TABLE_COLUMNS", f"{path} has no column {name!r}", remedy)
        first, second, *others = [*wanted, ""] if len(wanted) == 1 else wanted
        if others:
            return PASSAGE, Columns(first, second, tuple(others), free)
        with_texts = COMPLETION if second else TEXT
        return CHAT if isinstance(cells.get(first), list) else with_texts, Columns(first, second)
    for task in TASKS:
        if columns := task.choose(names, cells):
            return task, columns._replace(free=free)
    kinds = "; ".join(f"{task.name} ({task.columns})" for task in TASKS)
    what = f"its columns ({', '.join(names)}) are those of no kind of data: {kinds}"
    raise WorkshopError(path, what, "name them, such as TABLE_COLUMNS=passage,query,reply or TABLE_COLUMNS=ask,reply")


def task_of(columns: list[str]) -> Task:
    """Return the kind of the examples or rows of tokens with these columns."""
    return next(task for task in TASKS if task.column in columns)
