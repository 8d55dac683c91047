"""Configuration with which Sphinx builds a web site from the pages: `make docs`.

All pages except the first one, index.md, are also the pages that GitHub and GitLab show.
"""

import html
import itertools
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
sys.path.append(str(Path(__file__).parent))
extensions = ["myst_parser", "sphinx_design", "slides"]
root_doc = "index"
include_patterns = ["index.md", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "report", "results", "scripts", "tests"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # create the same anchors as GitHub and GitLab
highlight_language = "none"  # a block without a language is the output of a command
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


def add_navigation(app, page: str, source: list[str]) -> None:
    """Add the navigation to the first page, in the order of the map in README.md and of the line after the map."""
    if page != root_doc:
        return
    readme = (REPOSITORY / "README.md").read_text()
    text = readme.split("## The workshop")[1].split("## Your own model")[0]
    sections, reference = (
        [*dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md", part))] for part in text.split("Reference pages:")
    )
    groups = {
        "Begin": ["Two commands, first steps <README>"],
        "Sections": [page for page in sections if page.startswith("docs/") and page.count("/") == 1],
        "Reference": reference,
        "For instructors": [
            *("docs/instructor/README", "docs/instructor/answers", "docs/instructor/own-copy"),
            *("Slides <docs/instructor/slides>", "docs/instructor/sheet", "docs/instructor/message"),
        ],
        "About": ["CONTRIBUTING", "CHANGELOG", "data/README"],
    }
    for caption, pages in groups.items():
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def prepare_for_phones(app, page: str, template: str, context: dict, doctree) -> None:
    """Add the markup that site.css needs to make a page readable on a narrow screen."""

    def prepare_table(table: re.Match) -> str:
        """Allow line breaks inside long names. In a table of many columns, add the column's heading to each cell."""
        text = re.sub(r"<code.*?</code>", lambda code: re.sub(r"(?<=\w)[_/.](?=\w)", r"\g<0><wbr>", code[0]), table[0])
        heads = re.findall(r"<th\b.*?</th>", text, re.DOTALL)
        if len(heads) < 5:
            return text
        labels = itertools.cycle(html.escape(html.unescape(re.sub("<.*?>", "", head)).strip()) for head in heads)
        text = re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', text)
        return text.replace('class="', 'class="many-columns ', 1)

    def wrap_lines(block: re.Match) -> str:
        lines = block[1].splitlines(keepends=True)
        return "<pre>" + "".join(f'<span class="line">{line}</span>' for line in lines) + "</pre>"

    body = context.get("body", "")
    body = re.sub(r'<table class="docutils.*?</table>', prepare_table, body, flags=re.DOTALL)
    body = re.sub(r"<pre><span></span>(.*?)</pre>", wrap_lines, body, flags=re.DOTALL)
    # Mark flags, because a browser breaks lines after the dashes in them
    flag = r'<span class="flag">\g<0></span>'
    code = r"<(pre|code)\b.*?</\1>"
    context["body"] = re.sub(code, lambda found: re.sub("--[A-Za-z0-9-]+", flag, found[0]), body, flags=re.DOTALL)


WHAT_FITS = REPOSITORY / "docs" / "what_fits"
STANDALONE = """<!doctype html>
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
    """Let Sphinx rebuild the page when one of its parts has changed."""
    if page == "docs/what-fits":
        for part in PARTS:
            app.env.note_dependency(str(part))


def add_what_fits(app, page: str, template: str, context: dict, doctree) -> None:
    """Insert the interactive part into docs/what-fits.md, and also write this page as a single file."""
    if page != "docs/what-fits":
        return
    markup, style, numbers, script = (part.read_text() for part in PARTS)
    interactive = (
        f"{markup}<style>{style}</style>"
        f'<script type="application/json" id="numbers">{numbers}</script>'
        f"<script>{script}</script>"
    )
    body = re.sub("<!-- interactive part: .* -->", lambda _: interactive, context["body"])
    context["body"] = body
    # Remove the theme's link signs after headings, and remove links to other pages, because a single file has none
    standalone = re.sub(r'<a class="headerlink".*?</a>', "", body)
    standalone = re.sub(r'<a [^>]*href="(?!#|http)[^>]*>(.*?)</a>', r"\1", standalone, flags=re.DOTALL)
    Path(app.outdir, "docs", "what-fits-alone.html").write_text(STANDALONE.format(body=standalone))


def setup(app) -> None:
    app.connect("source-read", add_navigation)
    app.connect("source-read", note_parts)
    app.connect("html-page-context", prepare_for_phones)
    app.connect("html-page-context", add_what_fits)
