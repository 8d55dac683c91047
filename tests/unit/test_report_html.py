"""What the report's page and its plots say, and that a stranger's text is shown in it and does nothing."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from report_files import add_run, table, write
from reporting.definitions import PLOTS
from reporting.plots import DRAWINGS, pareto_front
from reporting.report_folder import write_report
from reporting.tables import Table
from shared.paths import workshop_version

STAGE = "deepspeed-single-gpu/zero_1"
SCALING = "deepspeed-multi-gpu"


class Page(HTMLParser):
    """The elements of a page in order, each as (tag, attributes), and the text below each id and of the overview."""

    def __init__(self, html: str):
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.text += " " if tag in ("th", "td", "dt", "dd", "li") else ""

    def handle_data(self, data):
        self.text += data

    def of(self, *tags: str) -> list[dict]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    def section(self, name: str) -> str:
        """What is folded below a heading, or the overview, as words."""
        start = f'<div id="{name}">' if name != "overview" else "<h2>Overview</h2>"
        end = "</div></details>" if name != "overview" else "</section>"
        part = self.html.partition(start)[2].partition(end)[0]
        return " ".join(Page(part).text.split()) if part else ""


def page_of(top: Path, **options) -> Page:
    write_report([top], top / "report", all_runs=False, **options)
    return Page((top / "report" / "index.html").read_text(encoding="utf-8"))


def test_overview_tells_what_ran_what_failed_and_what_does_not_compare(tmp_path, monkeypatch):
    monkeypatch.setattr("reporting.runs.is_alive", lambda record: True)
    add_run(tmp_path, "custom-model", "7", status="running", exit_code=None)
    for job, gpus in ((1, 2), (2, 4)):
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus)
    add_run(tmp_path, f"{SCALING}/8_gpus", "3", world_size=8, settings__labels="answer")
    restarts = [{"time": "2026-11-20T10:00:20+00:00", "step": 4}]
    add_run(tmp_path, "baseline", "4", status="oom", exit_code=1, train=None, attempt=2, restarts=restarts)
    write(tmp_path / "experiments" / STAGE / "results" / "5.json", "{}")
    add_run(tmp_path, "fsdp-baseline", "6", cpu=None)
    page = page_of(tmp_path)
    assert f"Made by version {workshop_version()} of the workshop." in page.text
    overview = page.section("overview")
    for line in (
        "7 runs of 7 experiments; 4 completed. No run had a GPU:",
        "running: 1 run 7 custom-model ",
        f"incomplete: 1 run 5 {STAGE}: results/5.json: is not a valid run record (status: Field required)",
        "oom: 1 run 4 baseline: exit code 1; attempt 2, resumed at step 4",
        "completed, incomplete: 1 run 6 fsdp-baseline: cpu_memory: no log of job 6",
        "does not compare: 1 row, left out of lines over GPUs and of scatter plots "
        "3 8 GPUs in Weak scaling on one node: labels answer, others sequence",
        "a process seen in the moment it forks a child counts twice",
    ):
        assert line in overview, line


def test_long_lists_are_counted(tmp_path):
    for job in range(1, 31):
        add_run(tmp_path, STAGE, str(job), status="failed", exit_code=3)
    page = page_of(tmp_path)
    assert "failed: 30 runs" in page.section("overview") and "and 18 more" in page.section("overview")
    assert len([each for each in page.of("div") if each.get("id", "").startswith("job-")]) == 30


def test_each_number_leads_to_its_run(tmp_path):
    """And so does a job that a remark names, but for one whose id is that of a second run."""
    add_run(tmp_path, STAGE, "20")
    add_run(tmp_path, STAGE, "21", profile=[{"seconds_per_step": 1.0}])
    add_run(tmp_path, "baseline", "7")
    stop = {"signal": "SIGTERM", "step": 3, "checkpoint": "output/8/checkpoint-3"}
    add_run(tmp_path, "baseline", "8", status="stopped", exit_code=75, stop=stop)
    add_run(tmp_path, "fsdp-baseline", "8")
    page = page_of(tmp_path)
    stage = page.html.partition('<th scope="row">Stage 1<')[2].partition("</tr>")[0]
    link = '<a href="#job-20">20</a>'
    on_phone, job, status = f'"phone-only">{link}</small>', f">{link}</td>", "><span>completed</span></td>"
    assert [part in stage for part in (on_phone, job, status)] == [True] * 3
    assert len(re.findall(r'<a href="#job-20" tabindex="-1">[\d.,]+</a>', stage)) > 2
    assert 'the newer job <a href="#job-21">21</a> is not shown' in page.html
    assert "the newer job 8 is not shown" in page.html
    assert '<span class="flag">--resume_from_checkpoint</span> output/8/checkpoint-3' in page.html
    targets = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {"job-8", "job-8-2"} <= targets
    assert {link["href"].removeprefix("#") for link in page.of("a")} <= targets


def test_a_run_says_how_it_can_be_repeated(tmp_path):
    changes = {
        "command": ["scripts/train.py", "--dataset", "my file.json"],
        "git__dirty": True,
        "knobs__precision": {"requested": "fp16", "effective": "bf16"},
        "hardware": {"gpu": "NVIDIA H100", "gpus": 2},
    }
    folder = add_run(tmp_path, STAGE, "7", gpu=None, **changes)
    write(folder / "log" / "zero_1_7.out", "")
    facts = page_of(tmp_path).section("job-7")
    for fact in (
        "Job 7 Status completed",
        f"Problems {folder}/gpu_memory: no log of job 7",
        "Started 2026-11-20 10:00:07+00:00",
        "Hardware NVIDIA H100 Nodes node1; 1 rank",
        "Commit 82e46aa937dfa554eb105db9ed04c17dc4f23e5d with uncommitted changes",
        "Command of a rank scripts/train.py --dataset 'my file.json'",
        "Versions workshop 1.0.0, python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0",
        "precision: bf16 (requested: fp16); strategy: DeepSpeed ZeRO-1; ",
        "num_train_epochs=3.0",
        f"Record {folder}/results/7.json Log {folder}/log/zero_1_7.out",
    ):
        assert fact in facts, fact


def test_empty_columns_are_folded_with_their_reason(tmp_path):
    add_run(tmp_path, STAGE, "1", gpu=None, hardware__gpus=0)
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", gpu=None, hardware__gpus=0, cpu=None)
    shown = page_of(tmp_path).section("zero-stages-tiny-bloom")
    assert "Experiment Job Status" in shown and "Peak CPU memory (MiB)" in shown.partition("Left out")[0]
    assert re.search(r"Left out, as empty: Peak GPU memory \(MiB\),.* Mean GPU memory \(MiB\) \(no GPU\)\.", shown)
    assert "Peak GPU memory (MiB)" in (tmp_path / "report" / "zero-stages-tiny-bloom.csv").read_text()


def test_structure_is_told_to_who_cannot_see_it(tmp_path):
    add_run(tmp_path, "baseline", "1")
    add_run(tmp_path, STAGE, "2")
    page = page_of(tmp_path)
    assert page.of("html") == [{"lang": "en"}]
    assert all(header.get("scope") in ("row", "col") for header in page.of("th"))
    assert all(each.get("aria-label") for each in page.of("table"))
    assert len(page.of("img")) > 2 and all(len(image["alt"]) > 40 for image in page.of("img"))


HOSTILE = "\"><script>alert(1)</script></style><img src=x onerror=alert(1)> ${x} {{ 7 * 7 }} ' onfocus='x"


def test_a_strangers_text_is_shown_and_does_nothing(tmp_path):
    """It stands in every place of the page that a record or a name reaches."""
    changes = {
        "command": [HOSTILE],
        "knobs": {HOSTILE: {"requested": HOSTILE, "effective": "x"}, "precision": {"effective": HOSTILE}},
        "versions": {HOSTILE: HOSTILE, "torch": HOSTILE},
        "nodes": [HOSTILE],
        "git": {"commit": HOSTILE, "dirty": True},
        "settings__labels": HOSTILE,
        "settings__model_name": HOSTILE,
        "overrides": [HOSTILE],
        "missing": {HOSTILE: HOSTILE},
        "hardware__gpu": HOSTILE,
    }
    add_run(tmp_path, STAGE, "1", **changes)
    add_run(tmp_path, "baseline", HOSTILE.replace("/", ""))
    page = page_of(tmp_path)
    assert page.text.count(HOSTILE) > 10
    assert not page.of("script", "b") and len(page.of("style")) == 1
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.of("img"))
    assert all(link["href"].startswith("#") for link in page.of("a"))
    (policy,) = [each["content"] for each in page.of("meta") if "http-equiv" in each]
    (style,) = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:;")


# --- plots


def drawn(name: str, shown: Table) -> Figure:
    drawing, seen = DRAWINGS[name]
    figure = drawing(shown)
    assert figure and seen
    return figure


def scaling(top: Path, metric: str = "steady_samples_per_second") -> Table:
    """10.1, 18.9 and 35 samples/s on 2, 4 and 6 GPUs, and on 8 a run of other labels with 196 % efficiency."""
    for job, (gpus, rate) in enumerate(((2, 10.1), (4, 18.9), (6, 35.0), (8, 79.2)), 1):
        changes = {f"train__{metric}": rate} | ({"settings__labels": "answer"} if gpus == 8 else {})
        add_run(top, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, **changes)
    return table(top, "multi-gpu-weak-scaling")


def test_lines_over_gpus_leave_out_what_does_not_compare(tmp_path):
    shown = scaling(tmp_path)
    (axis,) = drawn("throughput", shown).axes
    ideal, measured = axis.lines
    assert list(measured.get_xdata()) == list(ideal.get_xdata()) == [2, 4, 6]
    assert list(measured.get_ydata()) == [10.1, 18.9, 35.0]
    assert axis.get_xlabel() == "GPUs\nLeft out, does not compare: 8 GPUs."
    (axis,) = drawn("efficiency", shown).axes
    assert axis.get_ylabel() == "Efficiency, per GPU (%)"
    assert list(axis.lines[1].get_ydata()) == pytest.approx([100, 93.564, 115.512], abs=0.001)
    page_of(tmp_path)
    text = (tmp_path / "report" / "multi-gpu-weak-scaling.md").read_text()
    seen = "Weak scaling on one node: samples per second over GPUs, beside the ideal"
    assert f"![{seen}](multi-gpu-weak-scaling-throughput.png)" in text


def test_plots_show_the_means_of_the_table(tmp_path):
    for job, (gpus, rate) in enumerate([(2, 10.0), (2, 14.0), (4, 20.0)], 1):
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, train__steady_samples_per_second=rate)
    shown = table(tmp_path, "multi-gpu-weak-scaling", all_runs=True)
    (axis,) = drawn("efficiency", shown).axes
    column = shown.definition.columns.index("efficiency.steady_samples_per_second")
    assert (
        list(axis.lines[1].get_ydata()) == [100, shown.rows[1].cells[column].value] == [100, pytest.approx(83.33, 1e-3)]
    )
    assert list(drawn("throughput", shown).axes[0].lines[1].get_ydata()) == [12.0, 20.0]


def test_rates_of_the_trainer_are_drawn_where_there_are_no_others(tmp_path):
    for job, (gpus, rate) in enumerate(((2, 10.0), (4, 18.0)), 1):
        changes = {"train__samples_per_second": rate, "train__steady_samples_per_second": None}
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, **changes)
    axis = drawn("throughput", table(tmp_path, "multi-gpu-weak-scaling")).axes[0]
    assert (axis.get_ylabel(), list(axis.lines[1].get_ydata())) == ("samples/s, with evaluation", [10.0, 18.0])


def test_each_plot_that_a_table_may_name_is_drawn():
    assert set(PLOTS) == set(DRAWINGS)


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(900, 0.5), (700, 1.5), (300, 5.0)], [(300, 5.0)]),
        ([(300, 1.0), (700, 5.0), (900, 9.0)], [(300, 1.0), (700, 5.0), (900, 9.0)]),
        ([(300, 1.0), (300, 2.0), (400, 2.0), (500, 3.0)], [(300, 2.0), (500, 3.0)]),
    ],
)
def test_pareto_front(points, front):
    assert pareto_front(points) == front


def test_speed_over_memory_shows_each_completed_run_and_the_pareto_front(tmp_path):
    measured = {"recipe": (900, 5.0), "bf16": (700, 1.5), "all": (300, 2.0), "dynamic_padding": (890, 4.9)}
    for number, (name, (peak, rate)) in enumerate(measured.items(), 1):
        add_run(tmp_path, f"efficiency/{name}", str(number), (100, peak, 50), train__steady_samples_per_second=rate)
    add_run(tmp_path, "efficiency/compile", "5", (100, 200, 50), settings__labels="answer")
    add_run(tmp_path, "efficiency/chunked_loss", "6", status="failed", exit_code=1)
    (axis,) = drawn("speed", table(tmp_path, "efficiency-tiny-bloom")).axes
    assert axis.get_xlabel() == "peak GPU memory (MiB)\nLeft out, does not compare: with torch.compile."
    assert (axis.get_xlim(), axis.get_ylim()) == ((0, pytest.approx(990)), (0, pytest.approx(5.5))), "no point is cut"
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines if len(line.get_xdata()) == 1]
    assert sorted(points) == sorted(measured.values())
    assert [text.get_text() for text in axis.texts] == ["1, 2", "3", "4"], "points that lie together have one label"


def test_legend_names_what_is_drawn(tmp_path):
    """A run without a log has no training line, one logged step is a marker, and a failed run says so."""
    folder = add_run(tmp_path, "methods-comparison/ddp", "1")
    write(folder / "log" / "ddp_1.out", "{'loss': '2.5', 'epoch': '0.5'}\n{'loss': '2.")
    add_run(tmp_path, "methods-comparison/fsdp1", "2", eval=[])
    add_run(tmp_path, "methods-comparison/fsdp2", "3", status="failed", exit_code=1)
    figure = drawn("loss", table(tmp_path, "methods-comparison"))
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert names == ["DDP, training", "DDP, evaluation", "FSDP2 (failed), evaluation"]
    assert figure.axes[0].lines[0].get_marker() == "x"


def test_memory_tells_the_peaks(tmp_path):
    add_run(tmp_path, STAGE, "1")
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", (100, 700), cpu=None)
    shown = table(tmp_path, "zero-stages-tiny-bloom")
    names = [text.get_text() for legend in drawn("memory", shown).legends for text in legend.get_texts()]
    assert names == ["Stage 1: GPU 900 MiB, CPU 90 MiB", "Stage 2: GPU 700 MiB"]
    bars = [[text.get_text() for text in axis.texts] for axis in drawn("peaks", shown).axes]
    assert bars == [["700", "900"], ["90"]]
