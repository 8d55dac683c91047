"""Configuration with which Sphinx builds a web site from the pages: `make docs`.

All pages except the first one, index.md, are also the pages that GitHub and GitLab show.
"""

import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY / "docs" / folder) for folder in ("site", "what_fits")]  # our three extensions

project = "Distributed LLM fine-tuning"
copyright = "the authors, CC BY 4.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx_design", "page_markup", "slides", "sphinx_part"]
root_doc = "index"
include_patterns = ["index.md", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md"]
include_patterns += ["docs/*.md", "docs/instructor/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "report", "results", "scripts", "tests"]
exclude_patterns += ["docs/README.md"]  # only forges show this page
myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 4  # create the same anchors as GitHub and GitLab
highlight_language = "none"  # a block without a language is the output of a command
smartquotes_action = "q"  # no dashes, because "--fsdp" is a flag
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
