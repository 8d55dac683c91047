"""What the report's page says, and that whatever a file holds is shown in it and does nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report import write_report
from report_files import add_run, gpu_log, write
from reporting.metrics import Cell, Compared, decimals
from reporting.page import html_cell
from reporting.plots import DRAWINGS, Shown, pareto_front
from reporting.render import in_markdown
from test_report_honesty import table

STAGE = "deepspeed-single-gpu/zero_1"
SCALING = "deepspeed-multi-gpu"
ALLOWED = {
    *("html", "head", "meta", "link", "title", "style", "body", "header", "main", "nav", "section", "h1", "h2", "p"),
    *("ul", "li", "dl", "dt", "dd", "div", "span", "a", "code", "small", "wbr", "figure", "img"),
    *("details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href", "class", "id", "title", "open", "alt", "src"),
    *("role", "aria-label", "tabindex", "scope"),
}


class Page(HTMLParser):
    """The elements of a page in order, each as (tag, attributes), and all of its text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of(self, *tags: str) -> list[dict]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def html_of(top: Path, **options: bool) -> str:
    write_report([top], top / "report", all_runs=options.get("all_runs", False))
    return (top / "report" / "index.html").read_text(encoding="utf-8")


def section(html: str, name: str) -> str:
    """What is folded below a heading."""
    found = re.search(rf'<div id="{name}">\n(.*?)\n</div></details>', html, re.DOTALL)
    assert found, name
    return found[1]


def link(number: int, job_id: str) -> str:
    """A run as it stands in a row or a list."""
    return f'<a href="#run-{number}" title="job {job_id}">#{number}<span class="unseen"> (job {job_id})</span></a>'


def cells_of(html: str, name: str, label: str) -> list[str]:
    row = re.search(rf'<tr><th scope="row">{re.escape(label)}</th>(.*?)</tr>', section(html, name))
    assert row, label
    return re.findall(r"<td[^>]*>(.*?)</td>", row[1])


# --- overview


def test_overview_tells_what_ran_what_failed_and_what_does_not_compare(tmp_path):
    for job, gpus in ((1, 2), (2, 4)):
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus)
    add_run(tmp_path, f"{SCALING}/8_gpus", "3", world_size=8, settings__labels="answer")
    add_run(tmp_path, "baseline", "4", status="oom", exit_code=1, train=None)
    write(tmp_path / "experiments" / STAGE / "results" / "5.json", "{}")
    add_run(tmp_path, "fsdp-baseline", "6", cpu=None)
    html = html_of(tmp_path)
    overview = html.partition("<h2>Overview</h2>")[2].partition("</section>")[0]
    assert "6 runs of 6 experiments; 4 completed." in overview
    assert f'<span class="bad">oom</span>: 1 run<ul><li>{link(5, "4")} baseline: exit code 1</li></ul>' in overview
    assert (
        f'<span class="bad">incomplete</span>: 1 run<ul><li>{link(1, "5")} {STAGE}: results/5.json: is no' in overview
    )
    damaged = f"<li>{link(6, '6')} fsdp-baseline: cpu_memory: no log of job 6</li>"
    assert f'<span class="bad">completed, incomplete</span>: 1 run<ul>{damaged}</ul>' in overview
    assert (
        f'<li>{link(4, "3")} 8 GPUs in <a href="#multi-gpu-weak-scaling">Weak scaling on one node</a>: '
        "labels answer, others sequence</li>"
    ) in overview


def test_run_that_differs_from_its_script_stands_once_in_the_overview(tmp_path):
    """And not again for the table of all runs."""
    add_run(tmp_path, "baseline", "1", overrides=["nodes: 3 instead of 1"])
    overview = html_of(tmp_path).partition("<h2>Overview</h2>")[2].partition("</section>")[0]
    assert overview.count("nodes: 3 instead of 1") == 1
    assert '<span class="bad">does not compare</span>: 1 row, left out of lines' in overview


def test_overview_holds_what_a_reference_has_shown(tmp_path):
    add_run(tmp_path, "baseline", "1")
    write_report([tmp_path], tmp_path / "reference", all_runs=False)
    write_report([tmp_path], tmp_path / "report", all_runs=False, reference=tmp_path / "reference")
    html = (tmp_path / "report" / "index.html").read_text()
    overview = html.partition("<h2>Overview</h2>")[2].partition("</section>")[0]
    assert re.search(r"<li>Against the reference [^<]*: \d+ numbers within, 0 outside", overview)
    assert '</a><small class="within">✓ equal, within</small></td>' in section(html, "baseline")


def test_overview_of_good_runs_names_no_failure(tmp_path):
    add_run(tmp_path, "baseline", "1", hardware__gpu="NVIDIA H100", hardware__gpus=1)
    overview = html_of(tmp_path).partition("<h2>Overview</h2>")[2].partition("</section>")[0]
    assert "1 run of 1 experiment; 1 completed." in overview
    assert overview.count("<li>") == 1


def test_overview_says_that_no_run_had_a_gpu(tmp_path):
    add_run(tmp_path, "baseline", "1")
    assert "No run had a GPU" in html_of(tmp_path)
    add_run(tmp_path, "baseline", "2", hardware__gpu="NVIDIA H100", hardware__gpus=1)
    assert "No run had a GPU" not in html_of(tmp_path)


def test_a_job_id_of_two_folders_is_no_link(tmp_path):
    add_run(tmp_path, "fsdp-baseline", "2")
    for job in ("1", "2"):
        add_run(tmp_path, "baseline", job, status="completed" if job == "1" else "failed")
    assert "the newer job 2 is not shown" in html_of(tmp_path)


def test_a_job_that_a_remark_names_is_a_link(tmp_path):
    add_run(tmp_path, "baseline", "1")
    add_run(tmp_path, "baseline", "2", profile=[{"seconds_per_step": 1.0}])
    assert re.search(r'the newer job <a href="#run-2"[^>]*>#2<.*?</a> is not shown: the profiler slowed it down',
                     html_of(tmp_path))  # fmt: skip


def test_long_lists_of_the_overview_are_counted(tmp_path):
    for job in range(1, 31):
        add_run(tmp_path, STAGE, str(job), status="failed", exit_code=3)
    html = html_of(tmp_path)
    overview = html.partition("<h2>Overview</h2>")[2].partition("</section>")[0]
    assert "failed</span>: 30 runs" in overview and "and 18 more" in overview
    assert len(re.findall(r'<div id="run-\d+">', html)) == 30


# --- tables


def test_each_number_leads_to_its_run(tmp_path):
    """Runs are numbered as they started, whatever their ids are."""
    add_run(tmp_path, STAGE, "20")
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "10")
    html = html_of(tmp_path)
    run, status, *numbers = cells_of(html, "zero-stages-tiny-bloom", "Stage 1")
    assert (run, status) == (link(2, "20"), "completed")
    assert len(numbers) > 2
    assert all(re.fullmatch(r'<a href="#run-2" tabindex="-1">[\d.,]+</a>', number) for number in numbers), numbers
    assert cells_of(html, "zero-stages-tiny-bloom", "Stage 2")[0] == link(1, "10")


def test_number_of_another_run_leads_nowhere(tmp_path):
    """In the trade-off, the numbers without offload are those of the reference."""
    stages = f"{SCALING}/2_gpus_stages_comparison"
    add_run(tmp_path, f"{stages}/zero_1", "1")
    add_run(tmp_path, f"{stages}/cpu_offloading/zero_1", "2")
    _, _, reference, own, *_ = cells_of(html_of(tmp_path), "offload-trade-off", "Stage 1")
    assert (reference, own) == ("900", '<a href="#run-2" tabindex="-1">900</a>')


def test_mean_names_all_of_its_runs(tmp_path):
    for job in ("1", "2"):
        add_run(tmp_path, STAGE, job, train__samples_per_second=float(job))
    html = html_of(tmp_path, all_runs=True)
    assert cells_of(html, "zero-stages-tiny-bloom", "Stage 1")[0] == f"{link(2, '2')}, {link(1, '1')}"
    assert ">1.5 ± 0.7 (2)</a>" in section(html, "zero-stages-tiny-bloom")


def test_a_run_says_how_it_can_be_repeated(tmp_path):
    changes = {
        "command": ["scripts/train.py", "--dataset", "my file.json"],
        "git__dirty": True,
        "knobs__precision": {"requested": "fp16", "effective": "bf16"},
        "restarts": [],
    }
    folder = add_run(tmp_path, STAGE, "7", gpu=None, hardware__gpu="NVIDIA H100", hardware__gpus=2, **changes)
    write(folder / "log" / "zero_1_7.out", "")
    facts = section(html_of(tmp_path), "run-1")
    for name, value in (
        ("Job", "7"),
        ("Status", "completed"),
        ("Problems", "<ul><li>" + f"{folder}/gpu_memory: no log of job 7" + "</li></ul>"),
        ("Started", "2026-11-20 10:00:07+00:00"),
        ("Hardware", "NVIDIA H100"),
        ("Nodes", "node1; 1 rank"),
        ("Commit", "82e46aa937dfa554eb105db9ed04c17dc4f23e5d with uncommitted changes"),
        ("Command of a rank", "<code>scripts/train.py --dataset &#x27;my file.json&#x27;</code>"),
        ("Record", f"<code>{folder}/results/7.json</code>"),
        ("Log", f"<code>{folder}/log/zero_1_7.out</code>"),
    ):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in facts, name
    assert "torch 2.13.0+cpu, transformers 5.23.0" in facts
    assert "precision: bf16 (requested: fp16); strategy: DeepSpeed ZeRO-1; " in facts
    assert "<code>num_train_epochs=3.0</code>" in facts


def test_run_without_a_log_says_so(tmp_path):
    add_run(tmp_path, STAGE, "7")
    assert "<dt>Log</dt><dd>not found</dd>" in section(html_of(tmp_path), "run-1")


def test_empty_columns_are_folded_with_their_reason(tmp_path):
    add_run(tmp_path, STAGE, "1", gpu=None, hardware__gpus=0)
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", gpu=None, hardware__gpus=0, cpu=None)
    html = html_of(tmp_path)
    shown = section(html, "zero-stages-tiny-bloom")
    headers = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', shown)
    assert "Peak CPU memory (MiB)" in headers, "one of two runs has it"
    assert not [name for name in headers if "GPU memory" in name]
    assert re.search(r"Left out, as empty: Peak GPU memory \(MiB\),.* Mean GPU memory \(MiB\) \(no GPU\)\.", shown)
    assert "Stage 1 <a" not in shown.partition("</table>")[2], "what is left out for all is not said for each"
    assert "Peak GPU memory (MiB)" in (tmp_path / "report" / "zero-stages-tiny-bloom.csv").read_text()
    assert "Peak GPU memory (MiB)" in (tmp_path / "report" / "zero-stages-tiny-bloom.md").read_text()


def test_header_tells_hardware_versions_and_gpu_hours(tmp_path):
    gpus = {"hardware__gpu": "NVIDIA H100", "hardware__gpus": 4}
    add_run(tmp_path, STAGE, "1", finished="2026-11-20T11:30:01+00:00", **gpus)
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", finished=None, **gpus, versions__torch="2.14.0")
    line = (
        "Hardware: NVIDIA H100 · torch 2.13.0+cpu (1 run); 2.14.0 (1 run) · transformers 5.23.0 · deepspeed 0.19.8 · "
        "GPU-hours: 6 in 1 run, no value for 1 (its end was not recorded)"
    )
    assert line in section(html_of(tmp_path), "zero-stages-tiny-bloom")
    assert in_markdown(line) in (tmp_path / "report" / "zero-stages-tiny-bloom.md").read_text()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([10.1, 18.93, 35.0], ["10.10", "18.93", "35.00"]),
        ([48.646, 144.785], ["48.65", "144.78"]),
        ([900.0, 1016.4], ["900", "1,016"]),
        ([900.0, 30000.0, None], ["900", "30,000", ""]),
        ([7.443193, 0.05], ["7.443", "0.050"]),
        ([12345.6, 0.5], ["12,346", "0.5"]),
        ([12345.6, 0.00012], ["12,346", "0.00012"]),
        ([2, 4], ["2", "4"]),
        ([21900], ["21900"]),
        ([1234567], ["1,234,567"]),
        ([0.0], ["0"]),
        ([float("nan"), 2.5, 3.4e38], ["nan", "2.5", "3.4e+38"]),
        (["tiny-bloom"], ["tiny-bloom"]),
    ],
)
def test_digits_agree_within_a_column(values, shown):
    cells = [Cell(value) for value in values]
    assert [cell.with_decimals(decimals(cells)) for cell in cells] == shown


def test_percentages_have_one_decimal():
    for values, shown in (([104.19, 0.136, -73.4], ["104.2", "0.1", "-73.4"]), ([0.0123, 0.5], ["0.0123", "0.5000"])):
        cells = [Cell(value) for value in values]
        assert [cell.with_decimals(decimals(cells, percent=True)) for cell in cells] == shown


def test_spread_has_the_digits_of_its_mean():
    mean, small = Cell(12.345, spread=0.6789, count=3), Cell(12.345, spread=0.0012, count=3)
    assert [cell.with_decimals(2) for cell in (mean, small)] == ["12.35 ± 0.68 (3)", "12.35 ± 0.0012 (3)"]


def test_number_beside_a_reference_is_told_in_words(tmp_path):
    add_run(tmp_path, STAGE, "1")
    row = next(row for row in table(tmp_path).rows if row.run)

    class Links:
        def from_number(self, text, run):
            return text

    for within, small in (
        (True, '<small class="within">✓ +3 % of &lt;b&gt;, within</small>'),
        (False, '<small class="outside">✗ +3 % of &lt;b&gt;, outside</small>'),
    ):
        row.cells[0] = replace(row.cells[0], compared=Compared("+3 % of <b>", within))
        assert html_cell(row, 0, "900", "peak_gpu", Links()) == f'<td class="number">900{small}</td>'


# --- for those who do not see it, and for those who would do harm


def test_structure_is_told_to_who_cannot_see_it(tmp_path):
    add_run(tmp_path, "baseline", "1")
    add_run(tmp_path, STAGE, "2")
    found = Page(html_of(tmp_path))
    assert found.of("html") == [{"lang": "en"}]
    assert len(found.of("h1")) == len(found.of("main")) == 1
    assert found.of("th") and all(header.get("scope") in ("row", "col") for header in found.of("th"))
    assert found.of("table") and all(each.get("aria-label") for each in found.of("table"))
    assert all(len(image["alt"]) > 40 for image in found.of("img"))
    regions = [each for each in found.of("div") if each.get("role") == "region"]
    assert len(regions) == len(found.of("table"))
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    assert len(found.of("details")) == len(found.of("summary")) > 4
    names = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(names) == len(set(names))


HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><style>*{}", "&lt;b&gt;", "\x1b[2J",
           "javascript:alert(1)", "\u202etxt", "${x}", "' onfocus='x", "]]>", "<!--", "a" * 5000]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_record_is_rendered(tmp_path, text):
    """It stands in every place of the page that a record or a name reaches."""
    changes = {
        "command": [text, text],
        "knobs": {text: {"requested": text, "effective": "x"}, "precision": {"effective": text}},
        "versions": {text: text, "torch": text},
        "nodes": [text],
        "git": {"commit": text, "dirty": True},
        "settings__labels": text,
        "overrides": [text],
        "missing": {text: text, "exact_match": text},
        "hardware__gpu": text,
    }
    folder = add_run(tmp_path, STAGE, "1", **changes)
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2")
    for name in (text.replace("/", "")[:100].encode("ascii", "replace").decode(), "x"):
        write(folder / "log" / f"{name}_1.out", "{'loss': 1, 'epoch': 1}\n")
    html = html_of(tmp_path)
    found = Page(html)
    assert {tag for tag, _ in found.elements} <= ALLOWED
    assert {name for _, attributes in found.elements for name in attributes} <= ATTRIBUTES
    assert all(each["href"].startswith("#") for each in found.of("a"))
    assert html.count("<style>") == 1 and len(found.of("img")) == html.count('src="data:image/png;base64,')
    assert html.replace("\n", "").isprintable()
    whole = text.encode("unicode_escape").decode() if not text.isprintable() else text
    assert whole[:500] in found.text


# --- plots


def rows_of(top: Path, name: str) -> list[Shown]:
    return [Shown(row.label, row.run, row.compares) for row in table(top, name).rows if row.run]


def scaling(top: Path, metric: str = "steady_samples_per_second") -> list[Shown]:
    """10.1, 18.9 and 35 samples/s on 2, 4 and 6 GPUs, and on 8 a run of other labels with 196 % efficiency."""
    for job, (gpus, rate) in enumerate(((2, 10.1), (4, 18.9), (6, 35.0), (8, 79.2)), 1):
        changes = {f"train__{metric}": rate} | ({"settings__labels": "answer"} if gpus == 8 else {})
        add_run(top, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, **changes)
    return rows_of(top, "multi-gpu-weak-scaling")


def test_throughput_says_what_is_seen_and_leaves_out_what_does_not_compare(tmp_path):
    plot = DRAWINGS["throughput"](scaling(tmp_path))
    assert plot.alt == (
        "Throughput (samples/s, steps alone) over GPUs: 10.1 samples/s on 2 GPUs, 18.9 samples/s on 4, "
        "35 samples/s on 6; ideal 30.3 on 6. "
        "Left out, does not compare: 8 GPUs."
    )
    (axis,) = plot.figure.axes
    ideal, measured = axis.lines
    assert list(measured.get_xdata()) == list(ideal.get_xdata()) == [2, 4, 6]
    assert list(measured.get_ydata()) == [10.1, 18.9, 35.0]
    assert axis.get_xlabel() == "GPUs\nLeft out, does not compare: 8 GPUs."
    assert axis.get_ylabel() == "samples/s, steps alone"


def test_throughput_names_the_runs_without_a_steady_rate(tmp_path):
    """More GPUs do fewer steps, of which none may be behind the warm-up."""
    for gpus, rate in ((2, 10.0), (4, 19.0), (6, None)):
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(gpus), world_size=gpus, train__steady_samples_per_second=rate)
    plot = DRAWINGS["throughput"](rows_of(tmp_path, "multi-gpu-weak-scaling"))
    assert plot.alt.endswith("Left out, no samples/s, steps alone: 6 GPUs.")


def test_throughput_tells_the_prediction(tmp_path):
    for job, (gpus, rate) in enumerate(((2, 10.0), (4, 18.0)), 1):
        changes = {"train__steady_samples_per_second": rate, "estimate": {"step": {"samples_per_second": 2 * rate}}}
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, **changes)
    alt = DRAWINGS["throughput"](rows_of(tmp_path, "multi-gpu-weak-scaling")).alt
    assert alt.endswith("18 samples/s on 4; ideal 20 on 4; predicted 20 on 2 GPUs, 36 on 4.")


def test_efficiency_leaves_out_what_does_not_compare(tmp_path):
    plot = DRAWINGS["efficiency"](scaling(tmp_path))
    assert plot.alt == (
        "Efficiency against 2 GPUs, ideal 100 %: 100 % on 2 GPUs, 94 % on 4, 116 % on 6. "
        "Left out, does not compare: 8 GPUs."
    )
    assert max(plot.figure.axes[0].lines[1].get_ydata()) < 120


def test_rates_of_the_trainer_are_drawn_where_there_are_no_others(tmp_path):
    for job, (gpus, rate) in enumerate(((2, 10.0), (4, 18.0)), 1):
        changes = {"train__samples_per_second": rate, "train__steady_samples_per_second": None}
        add_run(tmp_path, f"{SCALING}/{gpus}_gpus", str(job), world_size=gpus, **changes)
    axis = DRAWINGS["throughput"](rows_of(tmp_path, "multi-gpu-weak-scaling")).figure.axes[0]
    assert (axis.get_ylabel(), list(axis.lines[1].get_ydata())) == ("samples/s, with evaluation", [10.0, 18.0])


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


def test_speed_over_memory_shows_the_pareto_front(tmp_path):
    measured = {"recipe": (900, 5.0), "bf16": (700, 1.5), "all": (300, 2.0)}
    for number, (name, (peak, rate)) in enumerate(measured.items(), 1):
        changes = {"train__steady_samples_per_second": rate}
        add_run(tmp_path, f"efficiency/{name}", str(number), gpu=gpu_log(100, peak, 50), **changes)
    other = {"train__steady_samples_per_second": 9.0, "settings__labels": "answer"}
    add_run(tmp_path, "efficiency/compile", "4", gpu=gpu_log(100, 200, 50), **other)
    plot = DRAWINGS["speed"](rows_of(tmp_path, "efficiency-tiny-bloom"))
    assert plot.alt == (
        "Speed over peak GPU memory: Recipe 5 samples/s in 900 MiB; + bf16 1.5 samples/s in 700 MiB; "
        "All 2 samples/s in 300 MiB. On the Pareto front: Recipe, All. "
        "Left out, does not compare: with torch.compile."
    )
    front = next(line for line in plot.figure.axes[0].lines if line.get_label().startswith("Pareto"))
    assert list(zip(front.get_xdata(), front.get_ydata(), strict=True)) == [(300, 2.0), (900, 5.0), (900, 5.0)]


def test_legend_names_what_is_drawn(tmp_path):
    """A run without a log has no training line, one logged step is a marker, and a failed run says so."""
    folder = add_run(tmp_path, "methods-comparison/ddp", "1")
    write(folder / "log" / "ddp_1.out", "{'loss': '2.5', 'epoch': '0.5'}\n")
    add_run(tmp_path, "methods-comparison/fsdp1", "2", eval=[])
    add_run(tmp_path, "methods-comparison/fsdp2", "3", status="failed", exit_code=1)
    plot = DRAWINGS["loss"](rows_of(tmp_path, "methods-comparison"))
    names = [text.get_text() for legend in plot.figure.legends for text in legend.get_texts()]
    assert names == ["DDP, training", "DDP, evaluation", "FSDP2 (failed), evaluation"]
    assert [line.get_label() for line in plot.figure.axes[0].lines] == names
    assert plot.figure.axes[0].lines[0].get_marker() == "x"
    evaluations = "evaluation 7.38 then 7.096 then 7.012"
    assert plot.alt == f"Loss over epochs. DDP: training 2.5, {evaluations}; FSDP2 (failed): {evaluations}."


def test_memory_tells_the_peaks(tmp_path):
    add_run(tmp_path, STAGE, "1")
    add_run(tmp_path, "deepspeed-single-gpu/zero_2", "2", gpu=gpu_log(100, 700), cpu=None)
    rows = rows_of(tmp_path, "zero-stages-tiny-bloom")
    assert DRAWINGS["memory"](rows).alt == (
        "GPU and CPU memory over time. Peaks of Stage 1: GPU 900 MiB, CPU 90 MiB; Stage 2: GPU 700 MiB."
    )
    assert DRAWINGS["peaks"](rows).alt == (
        "Peak memory as bars. GPU: Stage 1 900 MiB; Stage 2 700 MiB. CPU: Stage 1 90 MiB."
    )


def test_plots_of_the_markdown_have_the_same_text(tmp_path):
    scaling(tmp_path)
    html_of(tmp_path)
    text = (tmp_path / "report" / "multi-gpu-weak-scaling.md").read_text()
    assert "![Throughput (samples/s, steps alone) over GPUs: 10.1 samples/s on 2 GPUs" in text
