"""Write slides.html, the slides of docs/instructor/slides.md, and print docs/instructor/sheet.md on one page.

slides.html is a single file, which a browser projects and prints without a network. Each heading of the page begins a
slide. The page's quotes are notes for the speaker, so the slides leave them out.
"""

import base64
import mimetypes
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SLIDES, SHEET = "docs/instructor/slides", "docs/instructor/sheet"
PARTS = {SLIDES: [HERE / "slides.css", HERE / "slides.js"], SHEET: [HERE / "sheet.css"]}
DECK = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{slides}
<script>{script}</script>
</body>
</html>
"""
SLIDE = """<section id="{number}" class="{name}">
{content}
<footer><a href="#{previous}">&lsaquo;</a> {number} / {count} <a href="#{following}">&rsaquo;</a></footer>
</section>"""


def data_address(figure: re.Match) -> str:
    """Replace the address of a figure by its content, so that the slides are a single file."""
    path = HERE.parent / "figures" / figure[1]
    return f'src="data:{mimetypes.guess_type(path)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"'


def write_slides(app, page: str, template: str, context: dict, doctree) -> None:
    if page != SLIDES:
        return
    body = re.sub("<blockquote>.*?</blockquote>", "", context["body"], flags=re.DOTALL)
    body = re.sub('<a class="headerlink".*?</a>|</section>', "", body)
    body = re.sub(r'src="[^"]*_images/([^"]+)"', data_address, body)
    _, *parts = re.split('<section id="(.*?)".*?>', body)
    names, contents = parts[::2], parts[1::2]
    count = len(contents)
    slides = [
        SLIDE.format(
            number=number,
            name=name,
            content=content.strip(),
            count=count,
            previous=max(number - 1, 1),
            following=min(number + 1, count),
        )
        for number, (name, content) in enumerate(zip(names, contents, strict=True), start=1)
    ]
    style, script = (part.read_text() for part in PARTS[SLIDES])
    deck = DECK.format(title=context["title"], style=style, slides="\n".join(slides), script=script)
    Path(app.outdir, "slides.html").write_text(deck)
    link = r'<a href="../../slides.html">\g<0></a>'
    context["body"] = re.sub("<code[^>]*><span[^>]*>build/site/slides.html</span></code>", link, context["body"])


def add_print_style(app, page: str, template: str, context: dict, doctree) -> None:
    if page == SHEET:
        context["metatags"] += f"<style>{PARTS[SHEET][0].read_text()}</style>"


def note_parts(app, page: str, source: list[str]) -> None:
    """Let Sphinx write a page again when its style or script has changed."""
    for part in PARTS.get(page, []):
        app.env.note_dependency(str(part))


def setup(app) -> None:
    app.connect("source-read", note_parts)
    app.connect("html-page-context", write_slides)
    app.connect("html-page-context", add_print_style)
