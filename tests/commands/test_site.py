"""Tests of the web site of `make docs` in a real browser."""

import html
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote_plus, unquote, urldefrag, urlencode, urljoin

import pytest

from browser import browse
from config import KNOBS
from estimate.command_line import parse_memory_plan
from estimate.communication import sent_bytes
from estimate.compare import comparison
from estimate.memory import estimate_parts
from estimate.model_shape import trace_shape
from helpers import REPOSITORY, program
from shared.paths import workshop_version

# The elements that are wider than the screen or scroll sideways, with the answers of quizzes unfolded
WIDE = """(() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true });
  const isWide = (each) => each.getBoundingClientRect().width > innerWidth ||
    (each.scrollWidth > each.clientWidth && ["auto", "scroll"].includes(getComputedStyle(each).overflowX));
  const wide = [...document.querySelectorAll("body, body *")].filter(isWide);
  return wide.map((each) => each.outerHTML.slice(0, 200)) })()"""

# Contrast between each text and the first opaque background below it (WCAG 2.2 requires 4.5)
CONTRAST = """((selector) => {
  const light = (color) => { const [r, g, b] = color.match(/[0-9.]+/g).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 };
  const ground = (each) => { const color = getComputedStyle(each).backgroundColor;
    return color.startsWith("rgba") && each.parentElement ? ground(each.parentElement) : light(color) };
  const ink = (each) => light(getComputedStyle(each).color);
  const pairs = [...document.querySelectorAll(selector)].map((each) => [ground(each), ink(each)]);
  return pairs.map(([page, ink]) => Math.max(ink, page) / Math.min(ink, page)) })"""

# The tab sets of a page: for each, whether the commands of a cluster and of a laptop are visible
TABS = """[...document.querySelectorAll(".sd-tab-set")].map((each) =>
  [...each.querySelectorAll(".sd-tab-content")].map((content) => content.checkVisibility()))"""


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
    page.visit(f"{address}/index.html")
    page.tab_to("a:has(img.front)")
    page.follow()
    assert page.evaluate("location.pathname") == f"/{WHAT_FITS}"


@pytest.mark.parametrize(
    ("name", "texts"),
    {
        "index": ".sd-card :is(.sd-card-title, p, a, code)",
        "docs/zero": ".sd-tab-label, .facts td, .sidebar-tree a, #quiz :is(p, summary), #key-points li, .cluster",
    }.items(),
)
def test_texts_have_enough_contrast_in_light_and_dark_mode(page, address, name, texts):
    backgrounds = set()
    for scheme in ("dark", "light"):
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.visit(f"{address}/{name}.html")
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        ratios = page.evaluate(f"{CONTRAST}({texts!r})")
        assert len(ratios) > 12 and min(ratios) >= 4.5
    assert len(backgrounds) == 2


def test_no_code_is_cut_at_1280_pixels(site, page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    for path in site.rglob("*.html"):
        page.visit(f"{address}/{path.relative_to(site)}")
        cut = "[...document.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)"
        assert page.evaluate(cut) == [], path


def test_tabs_of_cluster_and_laptop_follow_the_keyboard_together_and_are_both_printed(page, address):
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    page.visit(f"{address}/docs/multi-gpu.html")
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.visit(f"{address}/docs/multi-gpu.html?again")
    assert page.evaluate(TABS) == [[True, False]] * 3
    page.tab_to(".sd-tab-set input")
    page.press("ArrowRight", 39)
    assert page.evaluate(TABS) == [[False, True]] * 3
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate(TABS) == [[True, True]] * 3
    page.send("Emulation.setEmulatedMedia", media="")


def test_no_table_has_an_empty_head(site):
    for path in site.rglob("*.html"):
        for head in re.findall(r"<thead>.*?</thead>", path.read_text(encoding="utf-8"), re.DOTALL):
            assert re.sub(r"<[^>]*>", "", head).strip(), path


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


# What fits where

COMPUTE = program("docs/what_fits/compute.py")
WHAT_FITS = "docs/what-fits.html"
DOWN = ("ArrowDown", 40)
CLASS = {"model": "bloom-7b1", "batch": 1}  # choices of the page's static table
SETTINGS = [  # choices that differ from the page's defaults; together they use each value of each control
    CLASS,
    {"precision": "fp32", "gpus": 1, "memory": 16},
    {"length": 256, "batch": 16, "loss": "chunked", "gpus": 2, "per_node": 1, "memory": 24},
    {"length": 1024, "batch": 2, "attention": "sdpa", "checkpointing": "yes", "gpus": 64, "per_node": 8, "memory": 32},
    {"model": "bloom-1b1", "length": 2048, "batch": 8, "loss": "chunked", "accumulation": 1, "gpus": 16, "memory": 80},
    {"model": "bloom-1b7", "batch": 1, "gpus": 8, "per_node": 8, "memory": 16},
    {"model": "bloom-3b", "length": 4096, "batch": 1, "attention": "sdpa", "gpus": 32, "per_node": 4, "memory": 141},
    {"model": "custom-gpt", "precision": "fp32", "gpus": 2, "per_node": 8},
    {"model": "custom-gpt", "length": 2048, "loss": "chunked", "checkpointing": "yes", "accumulation": 1},
    {"model": "Llama-3.1-8B", "length": 2048, "batch": 2, "gpus": 8, "memory": 80},
    {"model": "Qwen2.5-7B", "length": 1024, "loss": "chunked", "checkpointing": "yes", "gpus": 16, "memory": 141},
]
VISITS = itertools.count()
# The cells of each method's row, and the rows of the selected method's table
READ_ROWS = """Object.fromEntries([...document.querySelectorAll("#methods .method")].map((row) => [row.dataset.method,
  [...row.querySelectorAll(".total, .verdict, .sent, .cpu")].map((cell) => cell.textContent)]))"""
READ_TABLE = """[...document.querySelectorAll("#chosen tr")].map((row) =>
  [...row.cells].map((cell) => cell.textContent).join(" "))"""
# Set the control KEY to VALUE as a user does
CHANGE = """(() => { const control = document.querySelector('#choices select[name="KEY"]');
  control.value = "VALUE"; control.dispatchEvent(new Event("change")) })()"""
TO_A_HEADING = """new Promise((done) => { addEventListener("hashchange", () => done(), { once: true });
  location.hash = "questions-for-a-class" })"""
ALL_SEEN = """(() => { const page = document.documentElement;
  return page.scrollWidth === page.clientWidth && page.clientWidth <= WIDTH &&
    [...document.querySelectorAll("#methods .method, #choices select")].every((each) => each.checkVisibility()) })()"""


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def visit(page, address):
    """Load the page with these choices in its address."""
    # The address needs a new number; otherwise a browser that already shows the page does not load it again
    return lambda choices="": page.visit(f"{address}/{WHAT_FITS}?{next(VISITS)}#{choices}")


def numbers() -> dict:
    return json.loads(COMPUTE.NUMBERS.read_text())


def test_stored_numbers_match_the_current_estimates(models_folder):
    """Compute a sample of the numbers again. If this test fails, run compute.py and commit its result."""
    flags = COMPUTE.model_flags(models_folder)
    for model, precision, accumulation, nodes, per_node in (
        ("bloom-560m", "bf16", 4, 2, 8),
        ("custom-gpt 1024", "fp32", 1, 1, 4),
        ("Llama-3.1-8B", "bf16", 1, 8, 8),
    ):
        stated = numbers()["models"][model]
        words, lengths = flags[model]
        computed = COMPUTE.layout_numbers(words, precision, accumulation, nodes, per_node)
        assert stated["cells"][precision][str(accumulation)][f"{nodes}x{per_node}"] == computed
        length = lengths[len(lengths) // 2]
        for attention, sizes in stated["passes"][precision].items():
            for cast, by_length in COMPUTE.pass_bytes(words, precision, attention, [length]).items():
                assert sizes[cast][str(length)] == by_length[length]
        assert json.loads(json.dumps(COMPUTE.chunk_sizes(words, precision))) == stated["chunks"][precision]
    assert json.loads(json.dumps(COMPUTE.methods())) == numbers()["methods"]
    assert COMPUTE.left_out() == numbers()["left_out"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_page_shows_the_estimates_of_the_program(page, visit, models_folder, setting, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # the directory in which a user runs the copied command
    visit()
    for key, value in setting.items():
        page.evaluate(CHANGE.replace("KEY", key).replace("VALUE", str(value)))
    shown = page.evaluate(READ_ROWS)
    command = page.evaluate("document.querySelector('.command pre').textContent").replace("\\\n", "").split()[2:]
    chosen = page.evaluate("document.querySelector('#methods input:checked').value")
    COMPUTE.model_flags(models_folder)  # writes the config.json files of the Hub's models
    command = [str(models_folder / word) if word in COMPUTE.DOWNLOADED else word for word in command]
    settings = parse_memory_plan(command, environment={})
    assert page.evaluate("document.querySelector('#chosen h3').textContent").startswith(chosen)
    for text in page.evaluate("[...document.querySelectorAll('.command pre')].map((each) => each.textContent)"):
        if "sbatch" in text:
            words = text.replace("\\\n", "").split()
            assert (REPOSITORY / words[1] / words[-1]).is_file()
            variables = dict(word.split("=") for word in words if re.match(r"[A-Z_0-9]+=", word))
            submitted = parse_memory_plan([], environment=variables).flat()
            model = submitted["model_name"]
            submitted["model_name"] = str(models_folder / model) if model in COMPUTE.DOWNLOADED else model
            asked = settings.flat()
            assert [submitted[knob.flag] for knob in KNOBS] == [asked[knob.flag] for knob in KNOBS]
    if settings.estimate.gpus > 1:
        gb = sent_bytes(trace_shape(settings), settings) / 1e9
        assert float(shown[chosen][2].split()[1]) == pytest.approx(gb, abs=0.06)  # the page shows "sends 12.3 GB"

    trainer = replace(settings.trainer, deepspeed=None, fsdp=None, fsdp_config=None)
    settings = replace(settings, trainer=trainer, deepspeed_config=None, fsdp_config=None)
    said = comparison(settings)
    ranks_per_node = settings.estimate.gpus / settings.estimate.nodes
    rows = re.findall(r"^(\S+) +([\d.]+) +([\d.]+)  (fits|is tight|does not fit)", said, re.MULTILINE)
    assert len(rows) == len(shown) > 10
    for config, gib, of_node, verdict in rows:
        name = {"plain": "DDP"}.get(config, Path(config).stem)
        total, shown_verdict, _, cpu = shown[name]
        assert float(total.split()[0]) == pytest.approx(float(gib), abs=0.11), name
        assert shown_verdict.endswith(f" {verdict}"), name
        python = estimate_parts(settings)[-1].cpu / 2**30 * ranks_per_node
        if cpu:
            assert float(cpu.split()[-2]) == pytest.approx(float(of_node) - python, abs=0.11), name
    for config in set(re.findall(r"^(\S+\.json)", said, re.MULTILINE)) - {row[0] for row in rows}:
        assert Path(config).stem in page.evaluate("document.getElementById('left-out').textContent")


def test_choices_are_in_the_address_and_can_be_made_by_keyboard(page, visit):
    visit("model=bloom-3b&gpus=8")
    assert page.evaluate("document.querySelector('select[name=model]').value") == "bloom-3b"

    page.tab_to("#choices select[name=model]")
    page.press(*DOWN)
    assert "model=bloom-7b1" in page.evaluate("location.hash")
    before = page.evaluate(READ_ROWS)
    page.tab_to("#choices select[name=loss]")
    page.press(*DOWN)
    assert "loss=chunked" in page.evaluate("location.hash")
    assert page.evaluate(READ_ROWS) != before
    page.tab_to("#methods input")
    chosen = page.evaluate("document.activeElement.value")
    page.press(*DOWN)
    page.press(*DOWN)
    names = [method["name"] for method in numbers()["methods"]]
    assert page.evaluate("document.activeElement.value") == names[names.index(chosen) + 2]
    assert f"method={names[names.index(chosen) + 2]}" in page.evaluate("location.hash")
    page.tab_to(".command button")
    drawn = page.evaluate(READ_ROWS)
    visit(page.evaluate("location.hash.slice(1)"))
    assert page.evaluate(READ_ROWS) == drawn


def test_unknown_choices_in_a_link_are_reported_and_replaced_by_defaults(page, visit):
    visit("model=gpt-5&gpus=8&constructor=red&method=hybrid_shard_2x2")
    said = page.evaluate("document.getElementById('message').textContent")
    assert "model=gpt-5" in said and "bloom-560m is used" in said and "constructor=red" in said
    assert "hybrid_shard_2x2 cannot be used here: DDP is chosen" in said
    assert page.evaluate("[...document.querySelectorAll('select')].map((each) => each.value)")[0] == "bloom-560m"
    assert page.evaluate("document.querySelector('select[name=gpus]').value") == "8"
    page.evaluate(TO_A_HEADING)  # a heading's anchor is not a choice
    assert page.evaluate("document.querySelector('select[name=gpus]').value") == "8"


def test_what_fits_page_fits_a_phone_screen_and_is_one_file(site, page, tmp_path):
    alone = tmp_path / "alone.html"
    alone.write_bytes((site / "docs/what-fits-alone.html").read_bytes())
    drawn = []
    for width in (390, 1280):
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for url in (f"file://{alone}", f"file://{site / WHAT_FITS}"):
            page.visit(f"{url}#{urlencode(CLASS)}")
            assert page.evaluate(ALL_SEEN.replace("WIDTH", str(width))), (url, width)
            drawn.append(page.evaluate(READ_ROWS))
    assert drawn == [drawn[0]] * 4 and len(drawn[0]) > 10
    page.visit(f"file://{alone}")
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_answers_to_the_questions_match_the_page(page, visit):
    """Check each claim, "`method` (facts of its row and its table)", on the page that the link before it opens."""
    text = (REPOSITORY / "docs/what-fits.md").read_text()
    assert text.count("<details>") == 3
    links = re.split(r'href="#([^"]+)"', text)[1:]
    for setting, answer in zip(links[::2], links[1::2], strict=True):
        visit(html.unescape(setting))
        assert page.evaluate("document.getElementById('message').textContent") == ""
        claims = re.findall(r"`(\w+)` \(([^)]* Gi?B[^)]*)\)", answer)
        for label, claimed in claims:
            name = "DDP" if label == "plain" else label
            page.evaluate(f"document.querySelector('#methods input[value={name}]').click()")
            said = page.evaluate(READ_ROWS)[name] + page.evaluate(READ_TABLE)
            for fact in claimed.split(", "):
                assert any(each.endswith(fact) for each in said), (setting, name, said)
        assert claims
    visit(html.unescape(links[0]))
    rows = page.evaluate(READ_ROWS)
    sizes = {name: float(row[2].split()[1]) for name, row in rows.items() if row[1].endswith(" fits")}
    claimed = dict(re.findall(r"`(\w+)` \(([^)]*)\)", links[1]))
    assert {name for name, fact in claimed.items() if "fits" in fact or "sends" in fact} == sizes.keys()
    assert "sends" in claimed[min(sizes, key=sizes.get)]


def test_page_shows_a_table_without_javascript(site, page, visit):
    text = (site / WHAT_FITS).read_text()
    table = text.split("<noscript>")[1].split("</noscript>")[0]
    cells = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", table, re.DOTALL)]
    visit(urlencode(CLASS))
    rows = page.evaluate(READ_ROWS)
    assert len(cells) == 4 * len(rows)
    for name, total, verdict, sent_in_a_step in zip(*[iter(cells)] * 4, strict=True):
        assert [total, verdict, f"sends {sent_in_a_step}"] == [rows[name][0], rows[name][1][2:], rows[name][2]]
