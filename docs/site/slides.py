"""Build slides.html, the slides of the afternoon, and print docs/instructor/sheet.md on one page.

slides.html is a single file, which a browser projects and prints without a network. Each page of the afternoon gives
its title and questions, its figures, key points, the commands of "Start now" and its quiz. The order of the pages is
that of experiments/agendas.yaml, which also has `say`, the notes for the speaker. The key n shows these notes, and the
answers of the quiz.
"""

import base64
import html
import math
import mimetypes
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
SHEET, SHEET_STYLE = "docs/instructor/sheet", HERE / "sheet.css"
AGENDAS = yaml.safe_load((DOCS.parent / "experiments" / "agendas.yaml").read_text(encoding="utf-8"))
SECTIONS = {page: entry for group in AGENDAS["sections"].values() for page, entry in group.items()}
LINES, LETTERS = 12, 68  # lines of text on a slide, letters in a line
SLIDE = """<section id="{number}" class="{kind}">
{content}
<aside>{notes}</aside>
<footer>{name} <a href="#{previous}">&lsaquo;</a> {number} / {count} <a href="#{following}">&rsaquo;</a></footer>
</section>
"""
DECK = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{slides}<script>{script}</script>
</body>
</html>
"""


class Slide(NamedTuple):
    kind: str
    heading: str
    content: str
    notes: str = ""
    name: str = ""


@dataclass
class Row:
    """A row of the afternoon: a page, or a pause if `page` is empty."""

    time: str
    name: str
    page: str
    minutes: int
    say: str


def agenda() -> list[Row]:
    """Return the afternoon: the rows of experiments/agendas.yaml, with the times that docs/instructor/day.md shows."""
    rows = AGENDAS["agendas"]["afternoon"]["rows"]
    text = (
        (DOCS / "instructor/day.md")
        .read_text(encoding="utf-8")
        .partition('generated.agenda("afternoon")')[2]
        .partition("[[[end]]]")[0]
    )
    shown = re.findall(
        r"^\| (\d+):(\d\d) \| (?:\[([^]]*)\]\([^)]*\)|([^|]*?))(?: \((\d+) min\).*)? \|$", text, re.MULTILINE
    )
    if len(rows) != len(shown):
        warn("docs/instructor/day", "differs from experiments/agendas.yaml; run make pages")
    return [
        Row(f"{hour}:{minute}", link or pause, row.get("page", ""), int(length or row["minutes"]), row.get("say", ""))
        for row, (hour, minute, link, pause, length) in zip(rows, shown, strict=False)
    ]


def warn(page: str, message: str) -> None:
    """Make the build fail, as `make docs` treats warnings as errors."""
    logging.getLogger(__name__).warning("%s.md: %s", page, message)


# --- parts of a page


def plain(node: nodes.Element) -> nodes.Element:
    """Copy a node without links, because the slides are a single file."""
    copy = node.deepcopy()
    for link in [*copy.findall(nodes.reference), *copy.findall(pending_xref)]:
        link.replace_self(link.children)
    return copy


def render(builder: Any, parts: Iterable[nodes.Element]) -> str:
    return "\n".join(builder.render_partial(plain(part))["fragment"] for part in parts)


def find_section(document: nodes.document, name: str) -> list[nodes.Element]:
    """Return what is below a heading."""
    found = [section for section in document.findall(nodes.section) if name in section["ids"]]
    return found[0].children[1:] if found else []


def items(section: list[nodes.Element]) -> list[nodes.list_item]:
    return [item for part in section for item in part.findall(nodes.list_item) if item.parent.parent == part.parent]


def questions_of_head(document: nodes.document) -> list[str]:
    rows = [[cell.astext() for cell in row.children] for row in document.findall(nodes.row)]
    return [question for row in rows if row[0] == "Questions" for question in re.split(r"(?<=\?)\s+", row[1])]


def question_and_answer(item: nodes.list_item) -> tuple[list[nodes.Element], list[nodes.Element]]:
    """Divide a quiz's item at its folded answer."""
    folds = [place for place, part in enumerate(item.children) if isinstance(part, nodes.raw)]
    first = folds[0] if folds else len(item.children)
    return item.children[:first], [part for part in item.children[first:] if not isinstance(part, nodes.raw)]


def commands(section: list[nodes.Element]) -> Iterator[nodes.Element]:
    """Yield the parts of "Start now", with the tabs for cluster and laptop one after the other."""
    for part in section:
        if isinstance(part, nodes.container):
            yield from commands(part.children)
        elif isinstance(part, nodes.rubric):
            yield nodes.paragraph("", f"On a {part.astext().lower()}:")
        elif not isinstance(part, nodes.comment | nodes.raw):
            yield part


def commands_of_a_pair(parts: list[nodes.Element]) -> list[nodes.Element]:
    """Return the first block of commands, and what follows the third: the others are for a reader without a class."""
    pair, _, laptop, *_ = [place for place, part in enumerate(parts) if isinstance(part, nodes.literal_block)]
    return [parts[pair], *parts[laptop + 1 :], nodes.paragraph("", "The sheet also has the commands for a laptop.")]


def data_address(path: Path) -> str:
    return f"data:{mimetypes.guess_type(path)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def figure(builder: Any, image: nodes.image) -> str:
    """Return a page's figure as large as the slide allows, with its caption: below it, or next to a tall one."""
    path = DOCS.parent / image["uri"]
    width, height = map(float, re.findall(r'viewBox="\S+ \S+ (\S+) (\S+)"', path.read_text(encoding="utf-8"))[0])
    below = image.parent.next_node(descend=False, siblings=True)
    caption = [below] if isinstance(below, nodes.paragraph) and isinstance(below[0], nodes.emphasis) else []
    shape = "wide" if width / height > 1.5 else "tall"
    text = html.escape(image["alt"], quote=True)
    return f'<div class="{shape}"><img src="{data_address(path)}" alt="{text}">{render(builder, caption)}</div>'


# --- slides


def length(part: nodes.Element) -> float:
    """Estimate the lines that a part takes, with the space below it. Code has smaller letters, and space around it."""
    lines = 0.5
    for block in part.findall(nodes.TextElement):
        if isinstance(block, nodes.literal_block):
            lines += 0.6 + sum(0.86 * math.ceil(len(line) / (LETTERS * 1.1)) for line in block.astext().split("\n"))
        elif isinstance(block, nodes.paragraph):
            lines += math.ceil(len(block.astext()) / LETTERS)
    return lines


def divide(parts: Sequence[nodes.Element]) -> list[list[nodes.Element]]:
    """Divide parts, such as the questions of a quiz, into slides that have room for them."""
    slides: list[list[nodes.Element]] = [[]]
    for part in parts:
        if slides[-1] and sum(map(length, [*slides[-1], part])) > LINES:
            slides.append([])
        slides[-1].append(part)
    return slides if parts else []


def slides_of_page(app: Any, row: Row) -> Iterator[Slide]:
    """Yield the slides of a page. Each numbered section has a figure, key points and a quiz."""
    page, builder = f"docs/{row.page}", app.builder
    document = app.env.get_doctree(page)
    title = next(document.findall(nodes.title)).astext()
    numbered = re.match(r"\d+\. ", title)
    asked = questions_of_head(document)
    first_words = next(document.findall(nodes.paragraph))
    content = "<ul>" + "".join(f"<li>{html.escape(each)}</li>" for each in asked) + "</ul>" if asked else ""
    minutes = f"<p>{row.time}, {row.minutes} minutes</p>\n"
    yield Slide("title", title, minutes + (content or render(builder, [first_words])), html.escape(row.say))
    images = list(document.findall(nodes.image))
    key_points, quiz = (items(find_section(document, name)) for name in ("key-points", "quiz"))
    for name, part in (("figure", images), ('"## Key points"', key_points), ('"## Quiz"', quiz)):
        if numbered and not part:
            warn(page, f"has no {name}, which the slides of the afternoon need")
    for image in images:
        yield Slide("figure", "", figure(builder, image))
    for part in divide(key_points):
        yield Slide("points", "Key points", f"<ul>{render(builder, part)}</ul>")
    start = list(commands(find_section(document, "start-now")))
    if "pair" in SECTIONS[row.page]:
        start = commands_of_a_pair(start)
    elif "shared" in SECTIONS[row.page]:
        start = []  # only the instructor submits these jobs
    for part in divide(start):
        yield Slide("start", "Start now", render(builder, part))
    folded = list(map(question_and_answer, quiz))
    questions = [nodes.list_item("", *(part.deepcopy() for part in question)) for question, _ in folded]
    done = 0
    for part in divide(questions):
        answers = [
            nodes.list_item("", *(each.deepcopy() for each in answer)) for _, answer in folded[done:][: len(part)]
        ]
        asked_and_answered = (f'<ol start="{done + 1}">{render(builder, lists)}</ol>' for lists in (part, answers))
        yield Slide("quiz", "Quiz", *asked_and_answered)
        done += len(part)


def slides_of_day(app: Any) -> Iterator[Slide]:
    rows = agenda()
    yield Slide("title", app.config.project, "<p>From one GPU to a choice in numbers</p>")
    lines = "".join(f"<tr><td>{row.time}</td><td>{row.name}</td><td>{row.minutes} min</td></tr>" for row in rows)
    yield Slide("agenda", "The agenda", f"<table>{lines}</table>")
    shell = find_section(app.env.get_doctree(SHEET), "in-each-new-shell")
    yield Slide("start", "In each new shell", render(app.builder, shell))
    for row in rows:
        if row.page:
            yield from (slide._replace(name=row.name) for slide in slides_of_page(app, row))
        else:
            yield Slide("title", row.name, f"<p>{row.time}, {row.minutes} minutes</p>", html.escape(row.say))


def write_slides(app: Any, exception: Exception | None) -> None:
    if exception or app.builder.name != "html":
        return
    slides = list(slides_of_day(app))
    shown = []
    for number, slide in enumerate(slides, start=1):
        level = "h1" if slide.kind == "title" else "h2"
        heading = f"<{level}>{html.escape(slide.heading)}</{level}>\n" if slide.heading else ""
        neighbours = {"previous": max(number - 1, 1), "following": min(number + 1, len(slides))}
        parts = slide._asdict() | {"content": heading + slide.content, "number": number, "count": len(slides)}
        shown.append(SLIDE.format(**parts, **neighbours))
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("slides.css", "slides.js"))
    deck = DECK.format(title=app.config.project, style=style, slides="".join(shown), script=script)
    Path(app.outdir, "slides.html").write_text(deck, encoding="utf-8")


def link_slides(app: Any, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Make a link of the slides' path, which is not a file in the repository."""
    if page.startswith("docs/instructor/"):
        link = r'<a href="../../slides.html">\g<0></a>'
        context["body"] = re.sub("<code[^>]*><span[^>]*>build/site/slides.html</span></code>", link, context["body"])


def add_print_style(app: Any, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    if page == SHEET:
        context["metatags"] += f"<style>{SHEET_STYLE.read_text(encoding='utf-8')}</style>"


def note_parts(app: Any, page: str, source: list[str]) -> None:
    """Let Sphinx write the sheet again when its style has changed."""
    if page == SHEET:
        app.env.note_dependency(str(SHEET_STYLE))


def setup(app: Any) -> None:
    app.connect("source-read", note_parts)
    app.connect("html-page-context", link_slides)
    app.connect("html-page-context", add_print_style)
    app.connect("build-finished", write_slides)
