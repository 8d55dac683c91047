"""The order of the pages, their quizzes, and the scripts and tests that they name."""

import itertools
import re
from collections.abc import Iterator

from helpers import REPOSITORY
from text_checks.common import SECTIONS, TEXTS, after, name_of, read

NAME_OLD_FILES = ("CHANGELOG.md", "original-documents.md")
THE_MAP = r"^\|([\d ]+)\| \[[^]]*\]\(docs/([\w-]+\.md)\)"


def findings() -> Iterator[str]:
    yield from files_that_pages_name()
    yield from the_map()
    yield from quizzes()
    yield from promises()


def files_that_pages_name() -> Iterator[str]:
    for page, text in TEXTS.items():
        for name in re.findall(r"`((?:scripts|experiments)/[\w/.-]+\.(?:py|sh|yaml))`", text):
            if page.name not in NAME_OLD_FILES and not (REPOSITORY / name).exists():
                yield f"{name_of(page)}: names {name}, which is not there; write the file's new name"


def the_map() -> Iterator[str]:
    """The README lists each section, and each page of its map leads to the next one."""
    rows = re.findall(THE_MAP, after(read("README.md"), "The workshop"), re.MULTILINE)
    for page, (number, title) in ((page, match.groups()) for page, match in SECTIONS.items()):
        if (f" {number} ", page.name) not in rows:
            row = f"| {number} | [{title}](docs/{page.name}) | ... |"
            yield f"README.md: The workshop: has no row for section {number}; write {row}"
    for (_, name), (_, following) in itertools.pairwise(rows):
        if not re.search(rf"^Next: \[.*\]\({following}\)$", read(f"docs/{name}"), re.MULTILINE):
            yield f"docs/{name}: does not lead to the next page of README.md's map; write Next: [...]({following})"


def quizzes() -> Iterator[str]:
    """Each question of a section has an answer, and something to discuss in docs/instructor/answers.md."""
    discussions = re.split(r"^## ", read("docs/instructor/answers.md"), flags=re.MULTILINE)
    for page, number in ((page, int(match[1])) for page, match in SECTIONS.items()):
        quiz = after(TEXTS[page], "Quiz")
        questions = len(re.findall(r"^\d+\. ", quiz, re.MULTILINE))
        answers = quiz.count("<details><summary>Answer</summary>")
        discussed = len(re.findall(r"^\d+\. ", "".join(discussions[number : number + 1]), re.MULTILINE))
        if questions < 3:
            yield f"{name_of(page)}: Quiz: has {questions} questions; write at least 3"
        if not questions == answers == quiz.count("</details>"):
            yield f"{name_of(page)}: Quiz: has {questions} questions and {answers} answers; write one answer for each"
        if discussed != questions:
            discusses = f"discusses {discussed} questions of section {number}, {name_of(page)} asks {questions}"
            yield f"docs/instructor/answers.md: {discusses}"


def promises() -> Iterator[str]:
    """Each promise in CONTRIBUTING.md names tests, or functions of text checks, that exist."""
    rows = after(read("CONTRIBUTING.md"), "Promises and their tests").split("\n| ")[3:]
    if not rows:
        yield "CONTRIBUTING.md: has no table below `## Promises and their tests`; keep this heading above the table"
    for row in rows:
        tests = re.findall(r"`([\w/.]+)::(\w+)`", row)
        if not tests:
            yield f"CONTRIBUTING.md: | {row.partition(' |')[0]} |: names no test; write `<file below tests/>::<test>`"
        for path, test in tests:
            if f"def {test}(" not in read(f"tests/{path}"):
                yield f"CONTRIBUTING.md: names {path}::{test}, which is not there; write the test's new name"
