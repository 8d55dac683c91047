"""Tests of the interactive part "What fits where" in a real browser, on the first page and on docs/what-fits.html."""

import html
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from config import KNOBS
from estimate.command_line import parse_memory_plan
from estimate.communication import sent_bytes
from estimate.compare import ORDER_TO_TRY, comparison
from estimate.memory import estimate_parts
from estimate.model_shape import trace_shape
from helpers import REPOSITORY, program

COMPUTE = program("docs/what_fits/compute.py")
FIRST_PAGE = "index.html"
WHAT_FITS = "docs/what-fits.html"
UP, DOWN = ("ArrowUp", 38), ("ArrowDown", 40)
# Choices that differ from the page's defaults. Together they use each value of each control that changes the arithmetic
SETTINGS = [
    {},
    {"model": "bloom-560m", "batch": 4, "precision": "fp32", "gpus": 1, "memory": 16},
    {"model": "bloom-3b", "length": 1024, "batch": 2, "attention": "sdpa", "checkpointing": "yes", "gpus": 64,
     "per_node": 8, "memory": 32},
    {"model": "custom-gpt", "length": 2048, "loss": "chunked", "accumulation": 1, "gpus": 2, "per_node": 1,
     "memory": 24},
    {"model": "Qwen2.5-7B", "length": 256, "batch": 16, "loss": "chunked", "attention": "sdpa", "checkpointing": "yes",
     "gpus": 16, "memory": 141},
]  # fmt: skip
VISITS = itertools.count()
# The texts of each method's row
READ_ROWS = """Object.fromEntries([...document.querySelectorAll("#methods .method")].flatMap((row) => {
  const cells = [...row.querySelectorAll("td:not(.bar)")];
  const texts = Object.fromEntries(cells.map((cell) => [cell.className, cell.firstChild.textContent]));
  return [...row.querySelectorAll(".member")].map((member) => [member.dataset.method, texts]) }))"""
# Each heading of the list, and the methods of each row below it
READ_GROUPS = """Object.fromEntries([...document.querySelectorAll("#methods tbody")].map((group) =>
  [group.querySelector(".group").textContent, [...group.querySelectorAll(".method")].map((row) =>
    [...row.querySelectorAll(".member")].map((member) => member.dataset.method))]))"""
READ_TABLE = """[...document.querySelectorAll("#chosen tr")].map((row) =>
  [...row.cells].map((cell) => cell.textContent).join(" "))"""
MESSAGE = "document.getElementById('message').textContent"
# Set the control KEY to VALUE as a user does
CHANGE = """(() => { const control = document.querySelector('#what-fits select[name="KEY"]');
  control.value = "VALUE"; control.dispatchEvent(new Event("change")) })()"""
TO_A_HEADING = """new Promise((done) => { addEventListener("hashchange", () => done(), { once: true });
  location.hash = "questions-for-a-class" })"""
# Click the second question, and wait until its choice is drawn and the page has stopped to scroll
ASK = """new Promise((done) => {
  document.querySelectorAll("#questions-for-a-class > ol > li > p > a")[1].click();
  setTimeout(() => done(), 1500) })"""
CONTROLS_SEEN = """(() => { const { top, bottom } = document.getElementById("choices").getBoundingClientRect();
  return top >= 0 && bottom <= innerHeight })()"""
MARKED = "[...document.querySelectorAll('label.changed select')].map((control) => control.name)"
TEXTS = "#what-fits :is(p, li, th, td, small, a, label, select, button, pre)"
# Everything is on the screen, and the first bar is on the first screen of a telephone (844 pixels with the site's head)
ALL_SEEN = """(() => { const page = document.documentElement;
  const [start, bar] = ["#what-fits-where", "#methods .bar"].map((each) => document.querySelector(each))
    .map((each) => each.getBoundingClientRect());
  return page.scrollWidth === page.clientWidth && page.clientWidth <= WIDTH && bar.bottom - start.top < 780 &&
    [...document.querySelectorAll("#methods .method, #what-fits select")].every((each) => each.checkVisibility())
})()"""


@pytest.fixture
def visit(page, address):
    """Load a page with these choices in its address."""

    def load(choices: str = "", name: str = WHAT_FITS) -> None:
        # The address needs a new number; otherwise a browser that already shows the page does not load it again
        page.visit(f"{address}/{name}?{next(VISITS)}#{choices}")

    return load


def choose(page, **choices: object) -> None:
    """Set controls as a user does."""
    for key, value in choices.items():
        page.evaluate(CHANGE.replace("KEY", key).replace("VALUE", str(value)))


def show_in(page, scheme: str, media: str = "screen") -> None:
    page.send("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])


def screen(page, width: int) -> None:
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)


@pytest.mark.promise("What fits where shows the numbers of estimate_memory.py, also on the first page")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())) or "defaults")
def test_page_shows_the_estimates_of_the_program(page, visit, tmp_path, setting, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # the directory in which a user runs the copied command
    visit("method=zero3")
    choose(page, **setting)
    shown = page.evaluate(READ_ROWS)
    command = page.evaluate("document.querySelector('.command pre').textContent").replace("\\\n", "").split()[2:]
    chosen = page.evaluate("document.querySelector('#methods input:checked').value")
    COMPUTE.model_flags(tmp_path)  # writes the config.json files of the Hub's models
    command = [str(tmp_path / word) if word in COMPUTE.DOWNLOADED else word for word in command]
    settings = parse_memory_plan(command, environment={})
    if chosen != "DDP":
        assert f"/{chosen}.json)" in page.evaluate("document.querySelector('#chosen h3').textContent")
    for text in page.evaluate("[...document.querySelectorAll('.command pre')].map((each) => each.textContent)"):
        if "sbatch" in text:
            words = text.replace("\\\n", "").split()
            assert (REPOSITORY / words[1] / words[-1]).is_file()
            variables = dict(word.split("=") for word in words if re.match(r"[A-Z_0-9]+=", word))
            submitted = parse_memory_plan([], environment=variables).flat()
            model = submitted["model_name"]
            submitted["model_name"] = str(tmp_path / model) if model in COMPUTE.DOWNLOADED else model
            asked = settings.flat()
            assert [submitted[knob.flag] for knob in KNOBS] == [asked[knob.flag] for knob in KNOBS]
    if settings.estimate.gpus > 1:
        gb = sent_bytes(trace_shape(settings), settings) / 1e9
        assert float(shown[chosen]["sent"]) == pytest.approx(gb, abs=0.06)

    trainer = replace(settings.trainer, deepspeed=None, fsdp=None, fsdp_config=None)
    settings = replace(settings, trainer=trainer, deepspeed_config=None, fsdp_config=None)
    said = comparison(settings)
    ranks_per_node = settings.estimate.gpus / settings.estimate.nodes
    rows = re.findall(r"^(\S+) +([\d.]+) +([\d.]+)  (fits|is tight|does not fit)", said, re.MULTILINE)
    assert len(rows) == len(shown) > 10
    for config, gib, of_node, verdict in rows:
        name = {"plain": "DDP"}.get(config, Path(config).stem)
        assert float(shown[name]["total"]) == pytest.approx(float(gib), abs=0.11), name
        assert shown[name]["verdict"].endswith(f" {verdict}"), name
        python = estimate_parts(settings)[-1].cpu / 2**30 * ranks_per_node
        assert float(shown[name]["cpu"]) == pytest.approx(float(of_node) - python, abs=0.11), name
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
    names = page.evaluate("[...document.querySelectorAll('#methods input')].map((each) => each.value)")
    assert page.evaluate("document.activeElement.value") == names[names.index(chosen) + 2]
    assert f"method={names[names.index(chosen) + 2]}" in page.evaluate("location.hash")
    page.tab_to(".command button")
    drawn = page.evaluate(READ_ROWS)
    visit(page.evaluate("location.hash.slice(1)"))
    assert page.evaluate(READ_ROWS) == drawn


def test_unknown_choices_in_a_link_are_reported_and_replaced_by_defaults(page, visit):
    visit("model=gpt-5&gpus=8&constructor=red&method=hybrid_shard_2x2")
    said = page.evaluate(MESSAGE)
    assert "model=gpt-5" in said and "bloom-7b1 is used" in said and "constructor=red" in said
    assert "FSDP HYBRID_SHARD 2 x 2 cannot be used here: DDP is chosen" in said
    assert page.evaluate("document.querySelector('select[name=model]').value") == "bloom-7b1"
    assert page.evaluate("document.querySelector('select[name=gpus]').value") == "8"
    page.evaluate(TO_A_HEADING)  # a heading's anchor is not a choice
    assert page.evaluate("document.querySelector('select[name=gpus]').value") == "8"


def test_pages_fit_a_phone_screen_and_one_of_them_is_a_single_file(site, page, tmp_path):
    alone = tmp_path / "alone.html"
    alone.write_bytes((site / "docs/what-fits-alone.html").read_bytes())
    drawn = []
    for width in (390, 1280):
        screen(page, width)
        for url in (f"file://{site / FIRST_PAGE}", f"file://{alone}", f"file://{site / WHAT_FITS}"):
            page.visit(url)
            assert page.evaluate(ALL_SEEN.replace("WIDTH", str(width))), (url, width)
            drawn += [page.evaluate(READ_ROWS)] if "index" not in url else []
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
        assert page.evaluate(MESSAGE) == ""
        rows = page.evaluate(READ_ROWS)
        claims = dict(re.findall(r"`(\w+)` \(([^)]* Gi?B[^)]*)\)", answer))
        for label, claimed in claims.items():
            name = "DDP" if label == "plain" else label
            page.evaluate(f"document.querySelector('#methods input[value={name}]').click()")
            row = rows[name]
            said = [f"{row['total']} GiB", row["verdict"], f"sends {row['sent']} GB", f"CPU {row['cpu']} GiB"]
            said += page.evaluate(READ_TABLE)
            for fact in claimed.split(", "):
                assert any(each.endswith(fact) for each in said), (setting, name, said)
        assert claims
        if setting == links[0]:
            sizes = {name: float(row["sent"]) for name, row in rows.items() if row["verdict"].endswith(" fits")}
            assert claims.keys() == sizes.keys() and "sends" in claims[min(sizes, key=sizes.get)]


def test_a_question_sets_and_marks_controls_and_scrolls_to_them(page, visit):
    visit()
    page.evaluate(ASK)
    words = "Model bloom-7b1 → Llama-3.1-8B, GPUs 4 → 16, GPUs of a node 4 → 8, GiB of a GPU 40 → 80"
    assert page.evaluate(MESSAGE) == f"Changed: {words}."
    assert page.evaluate(MARKED) == ["model", "gpus", "per_node", "memory"]
    assert page.evaluate(CONTROLS_SEEN)


def test_pages_show_a_table_without_javascript(site, page, visit):
    groups = json.loads(COMPUTE.NUMBERS.read_text())["groups"].values()
    titles = {name: title for group in groups for name, title in group.items()}
    visit()
    rows = {}
    for name, row in page.evaluate(READ_ROWS).items():
        method = titles[name] if name == "DDP" else f"{titles[name]} ({name})"
        rows[method] = [row["total"], row["verdict"][2:], row["sent"], row["cpu"]]
    for name in (FIRST_PAGE, WHAT_FITS):
        static = (site / name).read_text().split("<noscript>")[1].split("</noscript>")[0]
        cells = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", static, re.DOTALL)]
        assert {method: each for method, *each in zip(*[iter(cells)] * 5, strict=True)} == rows
        assert name == WHAT_FITS or f'href="{WHAT_FITS}"' in static


def test_equal_methods_share_a_row_and_rows_can_be_sorted_by_what_fits(page, visit):
    visit()
    assert ["full_shard", "fsdp1_full_shard", "hybrid_shard"] in page.evaluate(READ_GROUPS)["FSDP"]
    page.evaluate("document.querySelector('[data-method=hybrid_shard]').click()")
    assert "/hybrid_shard.json" in page.evaluate("document.querySelector('.command pre').textContent")
    choose(page, order="fits")
    groups, rows = page.evaluate(READ_GROUPS), page.evaluate(READ_ROWS)
    assert list(groups) == ["Fits", "Does not fit"]
    for heading, methods in groups.items():
        assert {rows[name]["verdict"][2:] for row in methods for name in row} == {heading.lower()}
        assert methods == sorted(methods, key=lambda row: ORDER_TO_TRY.index(row[0]))


@pytest.mark.promise("What fits where shows the numbers of estimate_memory.py, also on the first page")
def test_first_page_agrees_with_the_page_that_it_leads_to(page, visit):
    """Its controls work by keyboard, and its links carry the choice."""
    visit("gpus=1&batch=4", FIRST_PAGE)
    page.tab_to("#choices select[name=model]")
    page.press(*UP)
    first = page.evaluate(READ_ROWS)
    assert "model=bloom-3b" in page.evaluate("document.getElementById('more').href")
    page.tab_to("#methods a[data-method=zero2]")
    page.follow()
    assert page.evaluate("location.pathname") == f"/{WHAT_FITS}"
    choice = page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
    assert {"model": "bloom-3b", "gpus": "1", "batch": "4", "method": "zero2"}.items() <= choice.items()
    whole = page.evaluate(READ_ROWS)
    assert first == {name: {key: row[key] for key in ("total", "verdict")} for name, row in whole.items()}
    assert len(first) > 14


def test_texts_have_enough_contrast_in_light_and_dark_mode_and_in_print(site, page):
    screen(page, 1280)
    for media, scheme in (("screen", "light"), ("screen", "dark"), ("print", "dark")):
        show_in(page, scheme, media)
        for name in (FIRST_PAGE, WHAT_FITS, "docs/what-fits-alone.html"):
            page.visit(f"file://{site / name}")
            found = page.contrasts(TEXTS)
            assert len(found) > 60 and min(found)[0] >= 4.5, (name, media, scheme, min(found))
    assert not page.evaluate("document.querySelector('.command button').checkVisibility()")  # in print
    show_in(page, "light")
