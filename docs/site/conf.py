"""How Sphinx makes a web site of the pages: `make docs`. The Markdown files are the same that a forge shows."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md"]
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
    text = source[0].split("## The workshop")[1].split("## All experiments")[0]
    sections, reference = (
        [*dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md", part))] for part in text.split("For reference:")
    )
    groups = {
        "Sections": [page for page in sections if page.count("/") == 1],
        "Reference": reference,
        "For instructors": ["docs/instructor/README", "docs/instructor/answers"],
        "About": ["CONTRIBUTING", "CHANGELOG", "data/README"],
    }
    for caption, pages in groups.items():
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app) -> None:
    app.connect("source-read", add_navigation)
