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
sys.path.append(str(REPOSITORY / "docs/what_fits"))  # the folder of sphinx_part

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx_design", "sphinx_part"]
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
        "For instructors": ["docs/instructor/README", "docs/instructor/answers", "docs/instructor/own-copy"],
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


def setup(app) -> None:
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", prepare_for_phones)
