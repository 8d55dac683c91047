"""Tests of the web site of `make docs` in a real browser."""

import html
import re
from urllib.parse import quote_plus, unquote, urldefrag, urljoin

import pytest
import yaml

from browser import browse
from helpers import REPOSITORY
from shared.paths import workshop_version

# The elements that are wider than the screen or scroll sideways, with the answers of quizzes unfolded
WIDE = """(() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true });
  const isWide = (each) => each.getBoundingClientRect().width > innerWidth ||
    (each.scrollWidth > each.clientWidth && ["auto", "scroll"].includes(getComputedStyle(each).overflowX));
  const wide = [...document.querySelectorAll("body, body *")].filter(isWide);
  return wide.map((each) => each.outerHTML.slice(0, 200)) })()"""

# The tab sets of a page: for each, whether the commands of a cluster and of a laptop are visible
TABS = """[...document.querySelectorAll(".sd-tab-set")].map((each) =>
  [...each.querySelectorAll(".sd-tab-content")].map((content) => content.checkVisibility()))"""


@pytest.mark.promise("the site can be read at 1,280 pixels, and its search finds the right page")
@pytest.mark.parametrize(
    ("words", "found"),
    {
        "reduce-scatter": "docs/glossary.html#reduce-scatter",
        "out of memory": "docs/troubleshooting.html",
        "csv": "README.html",
        "ask a question": "README.html",
        "NCCL timeout": "docs/hang-clinic.html",
    }.items(),
)
def test_search_finds_the_right_page_among_the_first_three(address, tmp_path, words, found):
    page, _ = browse(f"{address}/search.html?q={quote_plus(words)}", tmp_path, "--dump-dom")
    results = re.findall(r'<li[^>]*><a href="([^"]+)"', page.partition('id="search-results"')[2])
    assert any(result.startswith(found.partition("#")[0]) for result in results[:3]), results


@pytest.mark.promise("the site works on a phone, by keyboard, and in light and dark mode; its links work")
def test_no_page_is_wider_than_a_phone_screen(site, address, page):
    page.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    assert len(names) > 40
    for name in names:
        page.visit(f"{address}/{name}")
        assert page.evaluate("innerWidth") == 390, name
        assert page.evaluate(WIDE) == [], name


@pytest.mark.promise("the site works on a phone, by keyboard, and in light and dark mode; its links work")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_page_leads_each_reader_to_a_command_by_keyboard(page, address, width):
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    for number in (1, 2, 3):
        page.visit(f"{address}/index.html")
        page.tab_to(".skip-to-content")
        page.enter()
        card = f".sd-col:nth-child({number})"
        command = page.evaluate(f"[...document.querySelectorAll('{card} :is(code, pre)')].at(-1).textContent")
        page.tab_to(f"{card} li a")
        page.follow()
        blocks = page.evaluate("[...document.querySelectorAll('pre')].map((each) => each.textContent)")
        assert any(command in block for block in blocks), command
        assert page.evaluate("document.title").endswith(f"Distributed LLM fine-tuning {workshop_version()}")


@pytest.mark.promise("the site works on a phone, by keyboard, and in light and dark mode; its links work")
@pytest.mark.parametrize(
    ("name", "texts"),
    {
        "index": ".sd-card :is(.sd-card-title, p, a, code)",
        "docs/zero": ".sd-tab-label, .facts td, .sidebar-tree :is(a, .time), #quiz :is(p, summary), #key-points li,"
        ".cluster",
    }.items(),
)
def test_texts_have_enough_contrast_in_light_and_dark_mode(page, address, name, texts):
    backgrounds = set()
    for scheme in ("dark", "light"):
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.visit(f"{address}/{name}.html")
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        found = page.contrasts(texts)
        assert len(found) > 12 and min(found)[0] >= 4.5, min(found)
    assert len(backgrounds) == 2


def test_figures_have_the_ink_and_the_ground_of_their_page(page, address):
    inks = set()
    for scheme in ("dark", "light"):
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.visit(f"{address}/docs/pipeline.html")
        assert page.evaluate("document.querySelectorAll('svg.figure[role=img][aria-label]').length") == 2
        assert page.evaluate("document.querySelectorAll('img[src$=svg]').length") == 0
        ids = page.evaluate("[...document.querySelectorAll('svg.figure [id]')].map((each) => each.id)")
        assert len(ids) == len(set(ids))
        axis = 'svg.figure [style*="stroke: currentColor"]'
        assert page.evaluate(f"getComputedStyle(document.querySelector('{axis}')).stroke") == page.evaluate(
            "getComputedStyle(document.querySelector('article p')).color"
        )
        inks.add(page.evaluate("getComputedStyle(document.querySelector('svg.figure')).color"))
        assert (
            page.evaluate("getComputedStyle(document.querySelector('svg.figure')).backgroundColor")
            == "rgba(0, 0, 0, 0)"
        )
        page.visit(f"{address}/README.html")
        seen = "[...document.querySelectorAll('article img')].filter((each) => each.checkVisibility())"
        images = page.evaluate(f"{seen}.map((each) => [each.src.split('/').at(-1), each.naturalWidth > 0])")
        assert images == [["report-dark.png" if scheme == "dark" else "report.png", True]]
    assert len(inks) == 2


@pytest.mark.promise("the site can be read at 1,280 pixels, and its search finds the right page")
def test_no_code_is_cut_at_1280_pixels(site, page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    for path in site.rglob("*.html"):
        page.visit(f"{address}/{path.relative_to(site)}")
        cut = "[...document.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)"
        assert page.evaluate(cut) == [], path


@pytest.mark.promise("the site can be read at 1,280 pixels, and its search finds the right page")
def test_tabs_of_cluster_and_laptop_follow_the_keyboard_together_and_are_both_printed(page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    page.visit(f"{address}/docs/multi-gpu.html")
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.visit(f"{address}/docs/multi-gpu.html?again")
    assert page.evaluate(TABS) == [[True, False]] * 2
    page.tab_to(".sd-tab-set input")
    page.press("ArrowRight", 39)
    assert page.evaluate(TABS) == [[False, True]] * 2
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate(TABS) == [[True, True]] * 2
    page.send("Emulation.setEmulatedMedia", media="")


def test_no_table_has_an_empty_head(site):
    for path in site.rglob("*.html"):
        for head in re.findall(r"<thead>.*?</thead>", path.read_text(encoding="utf-8"), re.DOTALL):
            assert re.sub(r"<[^>]*>", "", head).strip(), path


def test_cells_to_fill_in_are_lines_on_a_telephone(page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    empty = "[...document.querySelectorAll('table.many-columns td:has(> p:empty)')]"
    for name in ("zero", "multi-gpu", "offload"):
        page.visit(f"{address}/docs/{name}.html")
        lines = page.evaluate(
            f"{empty}.map((cell) => [cell.dataset.label, cell.firstChild.offsetWidth, cell.firstChild.offsetHeight,"
            "getComputedStyle(cell.firstChild).borderBottomStyle])"
        )
        assert len(lines) >= 20, name
        for label, width, height, style in lines:
            assert label and width > 90 and height > 15 and style == "solid", (name, label)


def test_the_side_bar_marks_the_sections_of_the_afternoon_and_ends_with_the_other_pages(page, address):
    agendas = yaml.safe_load((REPOSITORY / "experiments" / "agendas.yaml").read_text(encoding="utf-8"))["agendas"]
    page.visit(f"{address}/index.html")
    marked = page.evaluate(
        "[...document.querySelectorAll('.sidebar-tree a:has([role=img][aria-label=afternoon][title=afternoon])')]"
        ".map((each) => each.getAttribute('href'))"
    )
    assert marked == [f"docs/{row['page']}.html" for row in agendas["afternoon"]["rows"] if "page" in row]
    assert page.evaluate("document.querySelector('.sidebar-tree .legend').innerText") == "● sections of the afternoon"
    heights = "[each.getBoundingClientRect().top - each.parentElement.getBoundingClientRect().top, each.offsetHeight]"
    times = page.evaluate(f"[...document.querySelectorAll('.sidebar-tree .time')].map((each) => {heights})")
    assert len(times) > 20 and all(top < height for top, height in times), "each time is on its entry's first line"
    captions = page.evaluate(
        "[...document.querySelectorAll('.sidebar-tree .caption-text')].map((each) => each.innerText)"
    )
    assert [each.lower() for each in captions[-3:]] == ["reference", "for instructors", "about"]


@pytest.mark.promise("the site works on a phone, by keyboard, and in light and dark mode; its links work")
def test_every_link_leads_somewhere(site):
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    for name, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            target, anchor = urldefrag(urljoin(f"/{name}", html.unescape(link)))
            if target.startswith(("http", "mailto:")):
                continue
            file = unquote(target).strip("/") or "index.html"
            assert (site / file).is_file(), f"{name}: {link}"
            if "=" not in anchor:  # otherwise the anchor holds choices for the page "What fits where"
                assert not anchor or file not in anchors or anchor in anchors[file], f"{name}: {link}"


def test_pages_load_nothing_from_another_server(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        taken = re.findall(
            r'(?:src|srcset)="(https?:|//)[^"]*"|<link [^>]*href="(?:https?:|//)[^"]*"|url\(["\']?https?:', text
        )
        assert not taken, path
