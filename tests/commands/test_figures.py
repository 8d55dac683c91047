"""The figures of the pages are readable, and they follow from their scripts and data."""

import itertools
import re

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from helpers import PAGES, REPOSITORY, program

FOLDER = REPOSITORY / "docs" / "figures"
FIGURES = sorted(path.stem for path in FOLDER.glob("*.svg"))
POINTS = 72  # points in an inch, which are the units of a file
SHOWN = {7.36: 736, 4.2: 350}  # width of a figure in inches -> pixels on a page, or on a telephone
SMALLEST = 9  # pixels of the size of type


def svg(name: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.promise("figures can be read, and follow from their scripts")
@pytest.mark.parametrize("name", FIGURES)
def test_the_text_of_a_figure_is_large_enough(name):
    width = float(re.search(r'viewBox="0 0 (\S+) ', svg(name))[1])
    pixels = {POINTS * inches: shown for inches, shown in SHOWN.items()}
    assert width in map(pytest.approx, pixels), f"{name}: {width} points wide; use WIDTH or PHONE_WIDTH of style.py"
    shown = next(pixels[each] for each in pixels if width == pytest.approx(each))
    # A text of 8 points has the scale 0.08
    scales = [float(scale) for scale in re.findall(r"scale\(([\d.]+) -\1\)", svg(name))]
    assert "<text" not in svg(name), "readers may lack the font; keep text as paths"
    assert scales and min(scales) * 100 * shown / width >= SMALLEST, f"{name}: texts of {min(scales) * 100} points"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_ink_of_its_page_and_colours_of_its_own_as_an_image(name):
    assert "fill: currentColor" in svg(name) and "stroke: currentColor" in svg(name)
    style = re.findall("<style>(.*?)</style>", svg(name), re.DOTALL)
    rules = re.findall(r"(\S+) {([^{}]*)}", style[0])
    assert len(style) == 1 and len(rules) == 2 and "(prefers-color-scheme: dark)" in style[0]
    for selector, properties in rules:
        assert selector == "svg:root", f"{selector} would apply to a page that contains the figure"
        assert re.fullmatch(r" color: \S+; background: \S+ ", properties)
    # White is the colour of texts on dark boxes. A white box would be a hole in a dark page
    assert not re.search(r"<path [^>]*fill: (#ffffff|white)", svg(name))


# Drawing again


@pytest.fixture(scope="module")
def draw():
    """The module docs/figures/draw.py. Matplotlib's settings are those of the figures while these tests run."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        draw = program("docs/figures/draw.py")
        matplotlib.rcParams |= program("docs/figures/style.py").STYLE
        yield draw


@pytest.fixture
def drawn_texts(monkeypatch):
    """Return a function that returns the places, in pixels, of all texts that a figure draws."""

    def find(figure: Figure) -> dict[Text, Bbox]:
        texts = {}
        original = Text.draw
        with monkeypatch.context() as patch:
            patch.setattr(Text, "draw", lambda text, renderer: (texts.update({text: None}), original(text, renderer)))
            figure.draw_without_rendering()
        return {text: text.get_window_extent() for text in texts if text.get_visible() and text.get_text().strip()}

    return find


def test_the_scripts_draw_each_figure(draw):
    assert sorted(draw.FIGURES) == FIGURES


@pytest.mark.promise("figures can be read, and follow from their scripts")
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_follows_from_its_script_and_its_texts_do_not_overlap(draw, drawn_texts, tmp_path, name):
    figure = draw.FIGURES[name]()
    draw.save(figure, name, tmp_path)
    same = (tmp_path / f"{name}.svg").read_text(encoding="utf-8") == svg(name)
    assert same, f"{name}.svg is old: run python docs/figures/draw.py and commit"
    places = drawn_texts(figure)
    for text, place in places.items():
        assert figure.bbox.contains(*place.min) and figure.bbox.contains(*place.max), f"{text} leaves the figure"
    for (one, place), (other, next_place) in itertools.combinations(places.items(), 2):
        assert not place.overlaps(next_place), f"{one} overlaps {other}"


# On the pages

SHOWN_ON_PAGES = [
    (page, alt, page.parent / target)
    for page in PAGES
    for alt, target in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text(encoding="utf-8"))
]


def test_each_picture_of_a_page_exists_and_its_alt_text_says_what_is_seen():
    for page, alt, path in SHOWN_ON_PAGES:
        assert path.is_file(), f"{page.name}: {path.name} is missing"
        assert len(alt) > 30, f"{page.name}: {path.name} needs an alt text that says what is seen, not {alt!r}"
    assert {path.stem for *_, path in SHOWN_ON_PAGES} >= set(FIGURES)


def test_numbers_of_an_alt_text_are_in_the_figure():
    for page, alt, path in SHOWN_ON_PAGES:
        if path.suffix == ".svg":
            texts = " ".join(re.findall(r"<!-- (.*?) -->", svg(path.stem), re.DOTALL))  # Matplotlib adds each text
            missing = [number for number in re.findall(r"\d+\.\d+", alt) if number not in texts.split()]
            assert not missing, f"{page.name}: {path.name} does not show {missing}"


@pytest.mark.promise("figures can be read, and follow from their scripts")
def test_the_pictures_of_the_report_have_the_names_of_todays_pages(tmp_path):
    pictures = program("docs/figures/pictures.py")
    for name, page in pictures.write_pages(tmp_path).items():
        assert pictures.find_names(page) == (FOLDER / f"{name}.txt").read_text(), "old pictures: run make figures"
