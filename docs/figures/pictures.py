"""Make the pictures of the report with a browser: `make figures`.

report.png and report-dark.png show the runs of one `make demo`, whose records are in docs/figures/demo. class.png shows
the made-up class of the tests. Next to the pictures, report.txt and class.txt name the columns and groups of the pages
that were shown, so that a test finds a picture that is too old.
"""

import base64
import io
import os
import re
import sys
import tempfile
from html import unescape
from pathlib import Path
from unittest.mock import patch

from PIL import Image

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("scripts", "tests", "tests/commands")]

from browser import Page
from class_files import make_class
from reporting.classroom_page import render_class
from reporting.classroom_plan import ClassPlan
from reporting.classroom_runs import ClassReader
from reporting.report_folder import write_report

HERE = Path(__file__).resolve().parent
NAMES = re.compile(r"<(h1|h2|th)\b[^>]*>(.*?)</\1>", re.DOTALL)
DEMO = "details:has(#demo) > summary, #demo .wide, #demo .plots"
# Picture -> its page, the mode, the width of the window in CSS pixels, and the element that it shows
PICTURES = {
    "report": ("report", "light", 900, DEMO),
    "report-dark": ("report", "dark", 900, DEMO),
    "class": ("class", "light", 1280, "header, .legend, .wide"),
}
SCALE = 2  # pixels of the picture per CSS pixel
BOX = """(() => { const boxes = [...document.querySelectorAll('SELECTOR')].map((each) => each.getBoundingClientRect());
  const bottom = Math.max(...boxes.map((box) => box.bottom)), top = Math.min(...boxes.map((box) => box.top));
  return {x: 0, y: top, width: document.documentElement.clientWidth, height: bottom - top} })()"""


def write_pages(folder: Path) -> dict[str, Path]:
    """Write the pages that the pictures show. Returns name -> page."""
    write_report([HERE / "demo"], folder / "report", all_runs=False)
    experiments = ClassPlan().experiments(shared=False)
    made = make_class(folder, experiments)
    with patch.dict(os.environ, PATH=f"{made.install_squeue(folder)}:{os.environ['PATH']}"):
        reader = ClassReader(made.folders, experiments)
        (folder / "class.html").write_text(render_class(reader, reader.read(), numbers=False, refresh=None))
    return {"report": folder / "report" / "index.html", "class": folder / "class.html"}


def find_names(page: Path) -> str:
    """Return the names of columns, rows and groups on a page, one per line."""
    texts = [re.sub("<[^>]*>", "", text) for _, text in NAMES.findall(page.read_text(encoding="utf-8"))]
    return "".join(f"{' '.join(unescape(text).split())}\n" for text in texts)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = write_pages(folder)
        browser = Page(folder / "profile")
        browser.send("Emulation.setScrollbarsHidden", hidden=True)
        try:
            for picture, (page, mode, width, selector) in PICTURES.items():
                metrics = {"width": width, "height": 900, "deviceScaleFactor": SCALE, "mobile": False}
                browser.send("Emulation.setDeviceMetricsOverride", **metrics)
                media = [{"name": "prefers-color-scheme", "value": mode}]
                browser.send("Emulation.setEmulatedMedia", features=media)
                browser.visit(pages[page].as_uri())
                browser.evaluate("document.querySelector('.written')?.remove()")  # a time would differ in each picture
                clip = browser.evaluate(BOX.replace("SELECTOR", selector)) | {"scale": 1}
                shot = browser.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
                image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
                image.quantize(256, dither=Image.Dither.NONE).save(HERE / f"{picture}.png", optimize=True)
                print(f"docs/figures/{picture}.png")
        finally:
            browser.close()
        for page, path in pages.items():
            (HERE / f"{page}.txt").write_text(find_names(path), encoding="utf-8")


if __name__ == "__main__":
    main()
