"""Sphinx extension that inserts the interactive part "What fits where" into the first page and docs/what-fits.md.

The site's pages load the numbers, the style and the script from files, because they share them. The second page is also
written as a single file that holds all three.
"""

import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = "docs/what-fits"
MARKUP = {"index": HERE / "first_page.html", PAGE: HERE / "page.html"}
STYLE, SCRIPT, NUMBERS = (HERE / name for name in ("what_fits.css", "what_fits.js", "numbers.json"))
NUMBERS_SCRIPT = "what_fits_numbers.js"
STANDALONE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What fits where</title>
<style>
@media not print {{ :root {{ color-scheme: light dark }} }}
body {{ font: 1rem/1.5 -apple-system, BlinkMacSystemFont, Segoe UI, Helvetica, Arial, sans-serif }}
body {{ max-width: 46rem; margin: auto; padding: 0 1rem }}
{style}</style>
</head>
<body>{body}<script>{numbers}</script><script>{script}</script></body>
</html>
"""


def numbers_script() -> str:
    """Return the numbers as a script, because a page that is opened from disk cannot fetch a JSON file."""
    numbers = json.dumps(json.loads(NUMBERS.read_text(encoding="utf-8")), separators=(",", ":"))
    return f"window.WHAT_FITS_NUMBERS = {numbers};\n"


def write_files(app) -> None:
    """Write the files that the two pages of the site load."""
    folder = Path(app.outdir, "_static")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(STYLE, folder)
    shutil.copy(SCRIPT, folder)
    (folder / NUMBERS_SCRIPT).write_text(numbers_script())


def note_files(app, page: str, source: list[str]) -> None:
    """Let Sphinx rebuild a page when one of its files has changed."""
    if page in MARKUP:
        for file in (MARKUP[page], STYLE, SCRIPT, NUMBERS):
            app.env.note_dependency(str(file))


def add_part(app, page: str, template: str, context: dict, doctree) -> None:
    """Insert the interactive part into a page."""
    if page not in MARKUP:
        return
    markup = MARKUP[page].read_text(encoding="utf-8")
    context["body"] = re.sub("<!-- interactive part: .* -->", lambda _: markup, context["body"])
    app.add_css_file(STYLE.name)
    for name in (NUMBERS_SCRIPT, SCRIPT.name):
        app.add_js_file(name, loading_method="defer")
    if page == PAGE:
        write_single_file(Path(app.outdir, f"{PAGE}-alone.html"), context["body"])


def write_single_file(path: Path, body: str) -> None:
    """Write the page as a single file: without the theme's link signs after headings and links to other pages."""
    body = re.sub(r'<a class="headerlink".*?</a>', "", body)
    body = re.sub(r'<a [^>]*href="(?!#|http)[^>]*>(.*?)</a>', r"\1", body, flags=re.DOTALL)
    page = STANDALONE.format(
        body=body,
        style=STYLE.read_text(encoding="utf-8"),
        numbers=numbers_script(),
        script=SCRIPT.read_text(encoding="utf-8"),
    )
    path.write_text(page)


def setup(app) -> None:
    app.connect("builder-inited", write_files)
    app.connect("source-read", note_files)
    app.connect("html-page-context", add_part)
