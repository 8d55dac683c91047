"""Write the slides of docs/instructor/slides.md as one HTML file that a browser projects and prints without a network.

Each heading of the page begins a slide. The page's quotes are notes for the speaker, so the slides leave them out.
"""

import base64
import mimetypes
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = "docs/instructor/slides"
STYLE, SCRIPT = HERE / "slides.css", HERE / "slides.js"
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
    if page != PAGE:
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
    deck = DECK.format(
        title=context["title"], style=STYLE.read_text(), slides="\n".join(slides), script=SCRIPT.read_text()
    )
    Path(app.outdir, "slides.html").write_text(deck)


def note_parts(app, page: str, source: list[str]) -> None:
    """Let Sphinx write the slides again when their style or script has changed."""
    if page == PAGE:
        for part in (STYLE, SCRIPT):
            app.env.note_dependency(str(part))


def setup(app) -> None:
    app.connect("source-read", note_parts)
    app.connect("html-page-context", write_slides)
