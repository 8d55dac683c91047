"""Tests of the report's page in a browser, folded, unfolded and printed.

All tables and plots must be visible, and the page must not send requests.
"""

import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from browser import browse
from report_files import RUNS, add_run
from reporting.report_folder import write_report

HIGHEST_FOLDED = 6300  # CSS pixels, with one entry for each of the 28 tables
HIGHEST_NAME = 110  # four lines with their padding
SCHEMES = {"dark": 0, "light": 1}  # Chromium's numbers
# A window is at least 500 pixels wide, but a frame in it can be as narrow as a phone. The frame stores the result of
# the page's probe in the DOM, which --dump-dom prints.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><iframe src="probed.html"
width="WIDTH" height="900" style="border: 0"></iframe><script>
addEventListener("message", (event) => { document.documentElement.dataset.probe = JSON.stringify(event.data) });
</script>"""
PROBE = """<script>
const isWide = () => document.documentElement.scrollWidth > document.documentElement.clientWidth;
const isSeen = (element) => { const box = element.getBoundingClientRect(); return box.width > 50 && box.height > 20 };
addEventListener("load", () => {
  const links = [...document.querySelectorAll("a")].map((link) => link.getAttribute("href"));
  const probe = {
    width: document.documentElement.clientWidth,
    background: getComputedStyle(document.body).backgroundColor,
    folded: document.documentElement.scrollHeight,
    foldedIsWide: isWide(),
    links: links.length,
    dead: links.filter((href) => !href.startsWith("#") || !document.getElementById(href.slice(1))),
  };
  probe.firstNumber = document.querySelector("td.number").getBoundingClientRect().bottom;
  const run = document.querySelector("[id^=job-102-]");
  probe.foldedRun = run.checkVisibility({contentVisibilityAuto: true});
  location.hash = run.id;
  probe.openedRun = run.checkVisibility({contentVisibilityAuto: true}) && run.getBoundingClientRect().height > 50;
  document.querySelectorAll("details").forEach((each) => { each.open = true });
  probe.tables = [...document.querySelectorAll("table")].map(isSeen);
  probe.plots = [...document.images].map((image) => isSeen(image) && image.naturalWidth > 300);
  probe.narrowPlots = [...document.images].every((image) => image.getBoundingClientRect().width <= innerWidth);
  probe.openedIsWide = isWide();
  const canvas = Object.assign(document.createElement("canvas"), {width: 600, height: 600})
    .getContext("2d", {willReadFrequently: true});
  probe.plotsOfTheMode = [...document.images].map((image) => {
    canvas.clearRect(0, 0, 600, 600);
    canvas.drawImage(image, 0, 0);
    const data = canvas.getImageData(0, 0, 600, 600).data, colours = new Set();
    for (let i = 0; i < data.length; i += 4) colours.add(`rgb(${data.slice(i, i + 3).join(", ")})`);
    return data[3] == 0 && colours.has(getComputedStyle(document.body).color);
  });
  const left = (each, name) => each.querySelector(name).getBoundingClientRect().left;
  probe.beside = [...document.querySelectorAll(".beside")].map((each) => left(each, "img") > left(each, "table") + 300);
  const heightOf = (element) => element ? element.getBoundingClientRect().height : 0;
  const names = [...document.querySelectorAll("tbody th")];
  probe.highestName = Math.max(...names.map((name) => heightOf(name) - heightOf(name.querySelector("small"))));
  const tables = [...document.querySelectorAll("table:not([aria-label^='All runs'])")];
  const first = tables.map((table) => table.querySelector("td.number"));
  probe.hidden = first.filter((cell) => cell && cell.getBoundingClientRect().right > innerWidth).length;
  const regions = [...document.querySelectorAll(".wide")];
  probe.scrolled = regions.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel);
  const labelled = document.querySelector("td.number");
  probe.label = getComputedStyle(labelled, "::before").content;
  probe.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  parent.postMessage(probe, "*");
});
</script>"""


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The report of the checked-in runs and of runs that failed, cannot be compared or have unreadable logs."""
    top = tmp_path_factory.mktemp("page")
    shutil.copytree(RUNS / "experiments", top / "experiments")
    for gpus in (1, 4, 8):
        name = "fsdp-single-gpu/full_shard" if gpus == 1 else f"fsdp-multi-gpu/{gpus}_gpus"
        overrides = ["nodes: 2 instead of 1"] if gpus == 8 else []
        add_run(top, name, str(gpus), world_size=gpus, overrides=overrides, hardware__gpu="NVIDIA H100 80GB HBM3")
    add_run(top, "custom-model/single_node", "9", status="oom", exit_code=1, train=None, eval=[])
    add_run(top, "mine", "11", experiment=".")
    add_run(top, "efficiency/recipe", "10", gpu="no log\n", settings__model_name="M" * 60)
    write_report([top], top / "report", all_runs=False)
    return top / "report"


def count_plots(output: Path) -> int:
    return (output / "index.html").read_text().count("<img ")


@pytest.mark.promise("the report fills the tables")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 600, 390])
def test_page_in_a_browser(output, tmp_path, width, scheme):
    page, frame = tmp_path / "probed.html", tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    text = (output / "index.html").read_text().replace("</html>", f"{PROBE}</html>")
    page.write_text(text.replace("default-src 'none'", "script-src 'unsafe-inline'; default-src 'none'"))
    look = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    options = ("--dump-dom", "--hide-scrollbars", "--window-size=1300,900", look)
    document, log = browse(frame.as_uri(), tmp_path / "profile", *options)
    probe = re.search(r'data-probe="([^"]*)"', document)
    assert probe, log[-2000:]
    seen = json.loads(unescape(probe[1]))
    assert (seen["width"], seen["background"]) == (
        width,
        {"dark": "rgb(19, 20, 22)", "light": "rgb(255, 255, 255)"}[scheme],
    )
    assert len(seen["tables"]) == len(list(output.glob("*.csv"))) and all(seen["tables"])
    assert len(seen["plots"]) == count_plots(output) > 5 and all(seen["plots"]) and seen["narrowPlots"]
    assert all(seen["plotsOfTheMode"]), "a plot has no ground, and the ink of the page's text"
    assert seen["firstNumber"] < 844, "the first screen, also of a phone, has a number"
    assert [name for name in seen["requests"] if not name.startswith("data:")] == []
    assert (seen["foldedIsWide"], seen["openedIsWide"]) == (False, False), "the page must not be wider than the window"
    assert 500 < seen["folded"] < HIGHEST_FOLDED
    assert seen["links"] > 100 and seen["dead"] == []
    assert (seen["foldedRun"], seen["openedRun"]) == (False, True), "a link to a run must unfold it"
    assert seen["highestName"] < HIGHEST_NAME, "the name of an experiment must not wrap to many lines"
    assert seen["hidden"] == 0, "each table must show a number before it is scrolled"
    if width < 1280:
        assert seen["scrolled"] == [], "on a narrow screen, a row is a card"
        assert seen["label"] == '"Final eval loss"', "in a card, a value is next to its heading"
    assert len(seen["beside"]) > 3 and set(seen["beside"]) == {width == 1280}, (
        "plots are beside their table if it is wide"
    )
    assert "CONSOLE" not in log, log[-2000:]


def test_page_is_printed_unfolded(output, tmp_path):
    paper = tmp_path / "page.pdf"
    _, log = browse((output / "index.html").as_uri(), tmp_path / "profile", f"--print-to-pdf={paper}")
    assert paper.exists(), log[-2000:]
    printed = re.findall(rb"/S /Figure\s*/Alt", paper.read_bytes())
    assert len(printed) == count_plots(output) > 5
