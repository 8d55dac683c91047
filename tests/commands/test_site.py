"""Tests of the web site of `make docs` in a real browser."""

import html
import re
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from browser import browse
from shared.paths import workshop_version

# The elements that are wider than the screen or scroll sideways, with the answers of quizzes unfolded
WIDE = """(() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true });
  const isWide = (each) => each.getBoundingClientRect().width > innerWidth ||
    (each.scrollWidth > each.clientWidth && ["auto", "scroll"].includes(getComputedStyle(each).overflowX));
  const wide = [...document.querySelectorAll("body, body *")].filter(isWide);
  return wide.map((each) => each.outerHTML.slice(0, 200)) })()"""

# Contrast between each text in the cards and the page's background (WCAG 2.2 requires 4.5)
CONTRAST = """(() => {
  const light = (color) => { const [r, g, b] = color.match(/[0-9.]+/g).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll(".sd-card :is(.sd-card-title, p, a, code)")]
    .map((each) => light(getComputedStyle(each).color)).map((ink) => Math.max(ink, page) / Math.min(ink, page)) })()"""


def test_site_search_finds_a_page(address, tmp_path):
    page, _ = browse(f"{address}/search.html?q=reduce-scatter", tmp_path, "--dump-dom")
    assert 'href="docs/collectives.html' in page


def test_no_page_is_wider_than_a_phone_screen(site, address, page):
    page.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    assert len(names) > 40
    for name in names:
        page.visit(f"{address}/{name}")
        assert page.evaluate("innerWidth") == 390, name
        assert page.evaluate(WIDE) == [], name


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_page_leads_each_reader_to_a_command_by_keyboard(page, address, width):
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    for number in (1, 2, 3):
        page.visit(f"{address}/index.html")
        page.tab_to(".skip-to-content")
        page.enter()
        card = f".sd-col:nth-child({number})"
        command = page.evaluate(f"[...document.querySelectorAll('{card} code')].at(-1).textContent")
        page.tab_to(f"{card} li a")
        page.follow()
        blocks = page.evaluate("[...document.querySelectorAll('pre')].map((each) => each.textContent)")
        assert any(command in block for block in blocks), command
        assert page.evaluate("document.title").endswith(f"Distributed LLM fine-tuning {workshop_version()}")


def test_cards_have_enough_contrast_in_light_and_dark_mode(page, address):
    backgrounds = set()
    for scheme in ("dark", "light"):
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.visit(f"{address}/index.html")
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        ratios = page.evaluate(CONTRAST)
        assert len(ratios) > 12 and min(ratios) >= 4.5
    assert len(backgrounds) == 2


def test_code_of_the_first_pages_is_not_cut_at_1280_pixels(page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    for name in ("index", "README", "experiments/README", "docs/pipeline"):
        page.visit(f"{address}/{name}.html")
        cut = "[...document.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)"
        assert page.evaluate(cut) == [], name


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
