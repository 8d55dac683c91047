"""Check the order of the pages, their quizzes, the files that they name, and the commands of a class."""

import ast
import itertools
import re
from collections.abc import Iterator

import yaml

from helpers import REPOSITORY
from text_checks.common import SECTIONS, TEXTS, TREES, read, relative_name, section_below
from text_checks.libraries import LIBRARIES

NAME_OLD_FILES = ("CHANGELOG.md", "original-documents.md")
PROGRAM = r"(?:scripts|experiments|benchmarks|exercises|tests)/[\w/.-]+\.(?:py|sh|yaml)"
FILE = rf"`({PROGRAM}|(?:ds_configs|fsdp_configs|data)/[\w/.-]+\.json)"


def findings() -> Iterator[str]:
    return itertools.chain(files(), bare_names(), order(), quizzes(), promises(), commands_of_pairs())


def files() -> Iterator[str]:
    """Check the files that pages and the --help texts of scripts name."""
    helps = {path: (ast.get_docstring(tree) or "").replace(" ", "`") for path, tree in TREES.items()}
    for path, text in (TEXTS | helps).items():
        for name in re.findall(FILE, text):
            if path.name not in NAME_OLD_FILES and not (REPOSITORY / name).exists():
                yield f"{relative_name(path)}: names {name}, which does not exist; write the file's new name"


def bare_names() -> Iterator[str]:
    """Check the files that pages name without a folder: ours, those that our programs write, and DeepSpeed's."""
    paths = (*REPOSITORY.glob("*"), *REPOSITORY.glob("[!.]*/**/*"), *LIBRARIES.glob("deepspeed/utils/zero_to_*.py"))
    known = {path.name for path in paths} | {*re.findall(r"[\w-]+\.\w+", "".join(map(read, TREES)))}
    for page, text in TEXTS.items():
        for name in re.findall(r"`([\w-]+\.(?:json|py|sh|slurm|toml|yaml))\b", text):
            if page.name not in NAME_OLD_FILES and name not in known:
                yield f"{relative_name(page)}: names {name}, but no file has this name; write the file's new name"


def order() -> Iterator[str]:
    """Check that experiments/agendas.yaml lists each section, and that each page leads to the next one."""
    groups = yaml.safe_load(read("experiments/agendas.yaml"))["sections"].values()
    pages = [page for group in groups for page in group]
    for page in SECTIONS:
        if page.stem not in pages:
            yield f"experiments/agendas.yaml: does not list {page.stem}; write it below sections"
    for name, following in itertools.pairwise(pages):
        if not re.search(rf"^Next: \[.*\]\({following}\.md\)$", read(f"docs/{name}.md"), re.MULTILINE):
            yield f"docs/{name}.md: does not link to the next page; write Next: [...]({following}.md)"


def promises() -> Iterator[str]:
    """Check that each promise of docs/reliability.md has a test. `pytest --promises` lists them."""
    tests = "".join(read(path) for path in REPOSITORY.glob("tests/*/test_*.py"))
    for number in re.findall(
        r"^(\d+)\. ", section_below(read("docs/reliability.md"), "What is promised"), re.MULTILINE
    ):
        if f'"reliability {number}"' not in tests:
            mark = f'@pytest.mark.promise("reliability {number}")'
            yield f"docs/reliability.md: promise {number} has no test; write {mark} before the test that keeps it"


def quizzes() -> Iterator[str]:
    """Check that each question has an answer in the page."""
    for page in SECTIONS:
        quiz = section_below(TEXTS[page], "Quiz")
        asked, answers = len(re.findall(r"^\d+\. ", quiz, re.MULTILINE)), quiz.count("<summary>Answer</summary>")
        if not 3 <= asked == answers == quiz.count("</details>"):
            number = f"asks {asked} questions and answers {answers}"
            yield f"{relative_name(page)}: Quiz: {number}; write 3 or more, each with an answer"


def commands_of_pairs() -> Iterator[str]:
    """Check that a pair finds the same commands on the page, on the sheet and in afternoon.sh, in an afternoon.

    `make pages-check` compares the pages with experiments/agendas.yaml, and tests/commands/test_slides.py the slides.
    """
    agendas = yaml.safe_load(read("experiments/agendas.yaml"))
    afternoon = [row.get("page") for row in agendas["agendas"]["afternoon"]["rows"]]
    pairs = [page for group in agendas["sections"].values() for page, entry in group.items() if "pair" in entry]
    for page in (page for page in pairs if page in afternoon):
        number, start = re.findall(r"^# (\d+).*\n((?:.*\n)*)", read(f"docs/{page}.md"))[0]
        cluster, _, laptop = re.findall(r"^```bash.*\n([^`]*)", section_below(start, "Start now"), re.MULTILINE)[:3]
        found = re.findall(rf"^# Section {number}\n([^`]*?)(?=# Section|```)", read("docs/instructor/sheet.md"), re.M)
        found += re.findall(rf"^# === \S+  {number} .*\n((?:.+\n)*)", read("experiments/afternoon.sh"), re.MULTILINE)
        if found != [cluster, laptop, laptop]:
            yield f"docs/{page}.md: the commands differ from those of sheet.md or afternoon.sh; run make pages"
