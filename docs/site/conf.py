"""Configuration with which Sphinx builds a web site from the pages: `make docs`.

All pages except the first one, index.md, are also the pages that GitHub and GitLab show.
"""

import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
sys.path.append(str(Path(__file__).parent))
extensions = ["myst_parser", "sphinx_design", "page_markup", "slides"]
root_doc = "index"
include_patterns = ["index.md", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "report", "results", "scripts", "tests"]
myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 4  # create the same anchors as GitHub and GitLab
highlight_language = "none"  # a block without a language is the output of a command
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


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
    app.connect("source-read", note_parts)
    app.connect("html-page-context", add_what_fits)
