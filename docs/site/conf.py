"""How Sphinx makes a web site of the pages: `make docs`. The Markdown files are the same that a forge shows."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "report", "results", "scripts", "tests"]
myst_heading_anchors = 4  # as a forge makes them
html_theme = "furo"
html_title = "Distributed LLM fine-tuning"
html_show_sourcelink = False
html_copy_source = False


def add_navigation(app, page: str, source: list[str]) -> None:
    """The order of the pages is that of the map in README.md, and of the line behind it."""
    if page != root_doc:
        return
    text = source[0].split("## The workshop")[1].split("## Your own model")[0]
    sections, reference = (
        [*dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md", part))] for part in text.split("For reference:")
    )
    groups = {
        "Sections": [page for page in sections if page.startswith("docs/") and page.count("/") == 1],
        "Reference": reference,
        "For instructors": ["docs/instructor/README", "docs/instructor/answers"],
        "About": ["CONTRIBUTING", "CHANGELOG", "data/README"],
    }
    for caption, pages in groups.items():
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


WHAT_FITS = REPOSITORY / "docs" / "what_fits"
ALONE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What fits where</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font-family: sans-serif; line-height: 1.5; max-width: 60rem; margin: auto; padding: 0 1rem }}
</style>
</head>
<body>{body}</body>
</html>
"""


PARTS = [WHAT_FITS / name for name in ("page.html", "what_fits.css", "numbers.json", "what_fits.js")]


def note_parts(app, page: str, source: list[str]) -> None:
    """The page is made anew when one of its parts has changed."""
    if page == "docs/what-fits":
        for part in PARTS:
            app.env.note_dependency(str(part))


def add_what_fits(app, page: str, template: str, context: dict, doctree) -> None:
    """The part of docs/what-fits.md that can be moved, with all that it needs; and the page as a single file."""
    if page != "docs/what-fits":
        return
    markup, style, numbers, script = (part.read_text() for part in PARTS)
    movable = (
        f"{markup}<style>{style}</style>"
        f'<script type="application/json" id="numbers">{numbers}</script>'
        f"<script>{script}</script>"
    )
    body = re.sub("<!-- here stands .* -->", lambda _: movable, context["body"])
    context["body"] = body
    # links to other pages lead nowhere from a single file, and signs behind headings are the theme's
    alone = re.sub(r'<a class="headerlink".*?</a>', "", body)
    alone = re.sub(r'<a [^>]*href="(?!#|http)[^>]*>(.*?)</a>', r"\1", alone, flags=re.DOTALL)
    Path(app.outdir, "docs", "what-fits-alone.html").write_text(ALONE.format(body=alone))


def setup(app) -> None:
    app.connect("source-read", add_navigation)
    app.connect("source-read", note_parts)
    app.connect("html-page-context", add_what_fits)
