"""How Sphinx makes a web site of the pages: `make docs`. All but the first, index.md, are those that a forge shows."""

import html
import itertools
import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx_design"]
root_doc = "index"
include_patterns = ["index.md", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "report", "results", "scripts", "tests"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as a forge makes them
highlight_language = "none"  # a block that says no language is what a command printed
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


def add_navigation(app, page: str, source: list[str]) -> None:
    """The order of the pages is that of the map in README.md, and of the line behind it."""
    if page != root_doc:
        return
    readme = (REPOSITORY / "README.md").read_text()
    text = readme.split("## The workshop")[1].split("## Your own model")[0]
    sections, reference = (
        [*dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md", part))] for part in text.split("For reference:")
    )
    groups = {
        "Begin": ["Two commands, first steps <README>"],
        "Sections": [page for page in sections if page.startswith("docs/") and page.count("/") == 1],
        "Reference": reference,
        "For instructors": ["docs/instructor/README", "docs/instructor/answers", "docs/instructor/own-copy"],
        "About": ["CONTRIBUTING", "CHANGELOG", "data/README"],
    }
    for caption, pages in groups.items():
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def prepare_for_telephones(app, page: str, template: str, context: dict, doctree) -> None:
    """What site.css needs, so that all of a page can be read on a narrow screen."""

    def labelled(table: re.Match) -> str:
        """Of many columns: each cell with the head of its column. All: code may break inside of a long name."""
        text = re.sub(r"<code.*?</code>", lambda code: re.sub(r"(?<=\w)[_/.](?=\w)", r"\g<0><wbr>", code[0]), table[0])
        heads = re.findall(r"<th\b.*?</th>", text, re.DOTALL)
        if len(heads) < 5:
            return text
        labels = itertools.cycle(html.escape(html.unescape(re.sub("<.*?>", "", head)).strip()) for head in heads)
        text = re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', text)
        return text.replace('class="', 'class="many-columns ', 1)

    def in_lines(block: re.Match) -> str:
        lines = block[1].splitlines(keepends=True)
        return "<pre>" + "".join(f'<span class="line">{line}</span>' for line in lines) + "</pre>"

    body = context.get("body", "")
    body = re.sub(r'<table class="docutils.*?</table>', labelled, body, flags=re.DOTALL)
    body = re.sub(r"<pre><span></span>(.*?)</pre>", in_lines, body, flags=re.DOTALL)
    # a browser breaks lines behind dashes
    flag = r'<span class="flag">\g<0></span>'
    code = r"<(pre|code)\b.*?</\1>"
    context["body"] = re.sub(code, lambda found: re.sub("--[A-Za-z0-9-]+", flag, found[0]), body, flags=re.DOTALL)


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
    app.connect("html-page-context", prepare_for_telephones)
    app.connect("html-page-context", add_what_fits)
