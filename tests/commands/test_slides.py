"""The slides and the sheet of commands of `make docs` in a real browser."""

import base64
import re

import pytest

from helpers import REPOSITORY

COUNT = "document.querySelectorAll('section').length"
SLIDES_MD = REPOSITORY / "docs/instructor/slides.md"
ROUTE = ("introduction", "baseline", "collectives", "ddp", "zero", "multi-gpu", "comparison")
# Load all figures, and return the alternative texts of those that cannot be shown
BROKEN_FIGURES = """Promise.all([...document.images].map((each) => each.decode().then(() => null, () => each.alt)))
  .then((all) => all.filter(Boolean))"""
# The slide that is shown, if a part of it is outside of the slide or its figure is small
CUT = """[...document.querySelectorAll("section")].filter((each) => each.checkVisibility())
  .filter((each) => each.scrollHeight > each.clientHeight || each.scrollWidth > each.clientWidth ||
    [...each.querySelectorAll("img")].some((figure) => figure.clientHeight < each.clientHeight / 2))
  .map((each) => each.innerText)"""
SHOWN = """[...document.querySelectorAll("section")].filter((each) => each.checkVisibility()).map((each) => each.id)"""
SMALLEST_TYPE = """Math.min(...[...document.querySelectorAll("section :is(p, li, td, pre)")]
  .map((each) => parseFloat(getComputedStyle(each).fontSize)))"""


@pytest.fixture
def slides(page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=720, deviceScaleFactor=1, mobile=False)
    page.visit("about:blank")  # otherwise a browser that already shows the slides keeps the current slide
    page.visit(f"{address}/slides.html")
    return page


def printed_pages(page) -> int:
    pdf = base64.b64decode(page.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
    return len(re.findall(rb"/Type /Page\b", pdf))


def test_there_are_about_25_slides_with_large_type_and_without_the_notes(slides):
    assert 20 <= slides.evaluate(COUNT) <= 30
    assert slides.evaluate(COUNT) == len(re.findall(r"^##? ", SLIDES_MD.read_text(), re.MULTILINE))
    assert slides.evaluate(SMALLEST_TYPE) >= 24
    assert "Say" not in slides.evaluate("document.body.textContent")


def test_keys_move_through_the_slides_and_the_address_names_the_current_one(slides):
    last = str(slides.evaluate(COUNT))
    for key, code, expected in (
        ("ArrowLeft", 37, "1"),
        ("ArrowRight", 39, "2"),
        (" ", 32, "3"),
        ("PageDown", 34, "4"),
        ("ArrowLeft", 37, "3"),
        ("End", 35, last),
        ("ArrowRight", 39, last),
        ("Home", 36, "1"),
    ):
        slides.press(key, code)
        assert slides.evaluate("location.hash") == f"#{expected}"
        assert slides.evaluate(SHOWN) == [expected]


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1920, 1080), (1024, 768)])
def test_no_slide_is_cut_and_each_figure_is_shown_large(slides, width, height):
    slides.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    for number in range(1, slides.evaluate(COUNT) + 1):
        slides.evaluate(f"location.replace('#{number}')")
        assert slides.evaluate(SHOWN) == [str(number)]
        assert slides.evaluate(CUT) == []
    assert slides.evaluate(BROKEN_FIGURES) == []
    assert slides.evaluate("document.images.length") >= 6


def test_slides_are_one_file_that_prints_one_slide_per_page(site, slides):
    assert printed_pages(slides) == slides.evaluate(COUNT)
    assert slides.evaluate("performance.getEntriesByType('resource').length") == 0
    assert not re.findall(r'(?:src|href)="(?!data:|#)', (site / "slides.html").read_text())


def test_the_sheet_of_commands_prints_on_one_page(page, address):
    page.visit(f"{address}/docs/instructor/sheet.html")
    assert printed_pages(page) == 1


def test_each_number_of_the_slides_is_on_a_page_of_the_afternoon():
    """Times and job ids are not checked."""
    pages = " ".join((REPOSITORY / f"docs/{name}.md").read_text() for name in ROUTE)
    text = re.sub(r"\d:\d\d|4711|\d+ minutes", "", SLIDES_MD.read_text().partition("## In each new shell")[2])
    numbers = set(re.findall(r"(?<![\w.,])\d+(?:[.,]\d+)+(?!\w)|(?<![\w.,])\d{2,}(?!\w)", text))
    assert len(numbers) > 20
    assert {number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", pages)} == set()
