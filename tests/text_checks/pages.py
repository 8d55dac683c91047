"""Check the order of the pages, their quizzes, and the files and tests that they name."""

import ast
import itertools
import re
from collections.abc import Iterator

from helpers import REPOSITORY
from text_checks.common import SECTIONS, TEXTS, TREES, read, relative_name, section_below

NAME_OLD_FILES = ("CHANGELOG.md", "original-documents.md")
FILE = r"`((?:scripts|experiments)/[\w/.-]+\.(?:py|sh|yaml)|(?:ds_configs|fsdp_configs|data)/[\w/.-]+\.json)"


def findings() -> Iterator[str]:
    return itertools.chain(files(), workshop_map(), quizzes(), promises())


def files() -> Iterator[str]:
    """Check the files that pages and the --help texts of scripts name."""
    helps = {path: (ast.get_docstring(tree) or "").replace(" ", "`") for path, tree in TREES.items()}
    for path, text in (TEXTS | helps).items():
        for name in re.findall(FILE, text):
            if path.name not in NAME_OLD_FILES and not (REPOSITORY / name).exists():
                yield f"{relative_name(path)}: names {name}, which does not exist; write the file's new name"


def workshop_map() -> Iterator[str]:
    """Check that the README lists each section, and that each page of its map links to the next page."""
    text = section_below(read("README.md"), "The workshop")
    for page, match in SECTIONS.items():
        if not re.search(rf"^\| {match[1]} \| \[.*\]\(docs/{page.name}\)", text, re.MULTILINE):
            row = f"| {match[1]} | [{match[2]}](docs/{page.name}) | ... | ... |"
            yield f"README.md: the map of the workshop has no row for section {match[1]}; write {row}"
    pages = re.findall(r"^\|[\d ]+\| \[[^]]*\]\(docs/([\w-]+\.md)\)", text, re.MULTILINE)
    for name, following in itertools.pairwise(pages):
        if not re.search(rf"^Next: \[.*\]\({following}\)$", read(f"docs/{name}"), re.MULTILINE):
            yield f"docs/{name}: does not link to the next page of README.md's map; write Next: [...]({following})"


def quizzes() -> Iterator[str]:
    """Check that each question has an answer in the page and a discussion in docs/instructor/answers.md."""
    to_discuss = re.split(r"^## ", read("docs/instructor/answers.md"), flags=re.MULTILINE)
    for page, match in SECTIONS.items():
        quiz = section_below(TEXTS[page], "Quiz")
        discussion = "".join(to_discuss[int(match[1]) :][:1])
        asked, discussed = (len(re.findall(r"^\d+\. ", text, re.MULTILINE)) for text in (quiz, discussion))
        answers = quiz.count("<details><summary>Answer</summary>")
        if not 3 <= asked == answers == quiz.count("</details>") == discussed:
            number = f"asks {asked} questions and answers {answers}, docs/instructor/answers.md discusses {discussed}"
            yield f"{relative_name(page)}: Quiz: {number}; write 3 or more, with an answer and a discussion for each"


def promises() -> Iterator[str]:
    """Check that the tests, or functions of text checks, of each promise in CONTRIBUTING.md exist."""
    for row in section_below(read("CONTRIBUTING.md"), "Promises and their tests").split("\n| ")[3:]:
        tests = re.findall(r"`([\w/.]+)::(\w+)`", row)
        if not tests:
            yield f"CONTRIBUTING.md: | {row.partition(' |')[0]} |: names no test; write `<file below tests/>::<test>`"
        for path, test in tests:
            if f"def {test}(" not in read(f"tests/{path}"):
                yield f"CONTRIBUTING.md: names {path}::{test}, which does not exist; write the test's new name"
