"""The slides and the sheet of commands of `make docs` in a real browser."""

import base64
import re

import pytest
import yaml

from helpers import REPOSITORY, until

COUNT = "document.querySelectorAll('section').length"
AFTERNOON = yaml.safe_load((REPOSITORY / "experiments/agendas.yaml").read_text())["agendas"]["afternoon"]["rows"]
SECTIONS = [row["page"] for row in AFTERNOON if row.get("page") not in (None, "introduction")]
# Return the texts of each kind of slide: those of list items and commands, and the alternative texts of figures
TEXTS = """Object.fromEntries(["points", "quiz", "figure", "start"].map((kind) => [kind,
  [...document.querySelectorAll(`.${kind} > :is(ul, ol) > li, .${kind} img, .start.${kind} pre`)]
    .map((each) => each.alt || each.textContent)]))"""
# Load all figures, and return the alternative texts of those that cannot be shown
BROKEN_FIGURES = """Promise.all([...document.images].map((each) => each.decode().then(() => null, () => each.alt)))
  .then((all) => all.filter(Boolean))"""
# Return the shown slide if a part of it is cut, or if its figure fills neither the width nor the height that a caption
# below it leaves
CUT = """[...document.querySelectorAll("section")].filter((each) => each.checkVisibility())
  .filter((each) => each.scrollHeight > each.clientHeight || each.scrollWidth > each.clientWidth ||
    [...each.querySelectorAll("img")].some((image) => {
      const { clientWidth, clientHeight, naturalWidth, naturalHeight, parentElement } = image;
      const scale = Math.min(clientWidth / naturalWidth, clientHeight / naturalHeight);
      const caption = parentElement.className === "wide" ? parentElement.querySelector("p")?.clientHeight ?? 0 : 0;
      return scale * naturalWidth < 0.95 * each.clientWidth &&
        scale * naturalHeight < 0.95 * (parentElement.clientHeight - caption) }))
  .map((each) => each.innerText)"""
SHOWN = """[...document.querySelectorAll("section")].filter((each) => each.checkVisibility()).map((each) => each.id)"""
NOTES = """[...document.querySelectorAll("aside")].filter((each) => each.checkVisibility())
  .map((each) => each.innerText)"""
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


def letters(text: str) -> str:
    """Return a text without its markup, quotes and spaces, as a page and a slide write them differently."""
    return re.sub(r"\W|_", "", re.sub(r"\]\([^)]*\)", "]", text))


def listed(page: str, heading: str) -> list[str]:
    """Return the items of the list below a heading of a page, without folded answers."""
    text = (REPOSITORY / f"docs/{page}.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    items = re.split(r"^(?:-|\d+\.) ", text, flags=re.MULTILINE)[1:]
    return [letters(re.split(r"\n\n(?=\S)", item)[0]) for item in items]


@pytest.mark.promise("the slides show the figures, the key points and the quiz of each section of the afternoon")
def test_the_deck_has_the_figures_the_key_points_and_the_quiz_of_each_section_of_the_afternoon(slides):
    shown = slides.evaluate(TEXTS)
    pages = "".join((REPOSITORY / f"docs/{page}.md").read_text() for page in SECTIONS)
    assert len(SECTIONS) >= 5 and shown["figure"] == re.findall(r"^(?:> )?!\[(.*)\]\(", pages, re.MULTILINE)
    for kind, heading in (("points", "Key points"), ("quiz", "Quiz")):
        assert list(map(letters, shown[kind])) == [item for page in SECTIONS for item in listed(page, heading)]
    # The first block of "Start now" is what the class types, on one slide. The first block of all is that of the sheet
    pages = [(REPOSITORY / f"docs/{page}.md").read_text().partition("## Start now")[2] for page in SECTIONS[:-1]]
    assert shown["start"][1:] == [re.findall(r"^```bash.*\n([^`]*)", page, re.M)[0] for page in pages]
    assert slides.evaluate("document.querySelectorAll('.start').length") == len(SECTIONS)


def test_the_type_is_large(slides):
    assert slides.evaluate(SMALLEST_TYPE) >= 24


def test_the_key_n_shows_the_notes_and_the_answers_which_otherwise_nobody_sees(slides):
    number = slides.evaluate("document.querySelector('.quiz').id")
    slides.evaluate(f"location.replace('#{number}')")
    assert slides.evaluate(NOTES) == []
    slides.press("n", 78)
    (notes,) = slides.evaluate(NOTES)
    answer = (REPOSITORY / f"docs/{SECTIONS[0]}.md").read_text().split("<details><summary>Answer</summary>")[1]
    assert letters(answer.strip().splitlines()[0])[:30] in letters(notes)
    assert all(letters(row["say"]) in letters(slides.evaluate("document.body.textContent")) for row in AFTERNOON)
    slides.press("n", 78)
    assert slides.evaluate(NOTES) == []


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


def test_a_click_and_a_swipe_move_through_the_slides(slides):
    for kind in ("mousePressed", "mouseReleased"):
        slides.send("Input.dispatchMouseEvent", type=kind, x=600, y=300, button="left", clickCount=1)
    assert slides.evaluate("location.hash") == "#2"
    for start, end, expected in ((900, 300, "#3"), (300, 900, "#2"), (900, 300, "#3")):
        for kind, touched in (("touchStart", [start]), ("touchMove", [end]), ("touchEnd", [])):
            slides.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": 300} for x in touched])
        until(lambda page=expected: slides.evaluate("location.hash") == page)
    # A click on a link only follows the link, and a click keeps a selection, which somebody may want to copy
    slides.evaluate("""{ const slide = document.querySelector("section:target");
      slide.querySelector("a").click(); getSelection().selectAllChildren(slide); slide.click() }""")
    assert slides.evaluate("location.hash") == "#2"


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


@pytest.mark.promise("the sheet prints on one page")
def test_the_sheet_of_commands_prints_on_one_page(page, address):
    page.visit(f"{address}/docs/instructor/sheet.html")
    assert printed_pages(page) == 1
