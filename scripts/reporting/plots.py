"""Draw the plots of a table. Lines and bars differ in dashes, markers and hatches, not only in colour.

The plots show the numbers of the table's cells. The plots over GPUs and over memory leave out runs that are not
comparable, which the page's overview lists.
"""

import io
import math
import re
import textwrap
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from job.memory_logs import local_seconds, memory_log_paths, read_cpu_log, read_gpu_log
from reporting.colours import INK, PARTS, SVG_STYLE
from reporting.metrics import HELD, Cell, decimals, format_number, format_rounded, metric_value
from reporting.render import Plot
from reporting.runs import NO_MEMORY, Missing, ReportedRun
from reporting.tables import Table, TableRow
from reporting.trainer_log import entries, find_log

FIGURE_WIDTH = 5.2  # inches: text of 11 points is readable when a phone shrinks a plot of this width
HEIGHT = 3.4  # inches
LEGEND_LINE = 0.24  # inches
TEXT_WIDTH = 60  # characters of a legend
NOTE_WIDTH = 36  # characters of a note below an axis, which may have long names to its left
BAR_NAME_WIDTH = 26  # characters of a line; the name of a bar has at most three lines
MANY_BARS = 6  # a figure with more bars is higher
PRINTED = ".4g"  # format of a loss in the log
MAX_TICKS = 6  # more numbers of five digits would touch each other
PAUSES_HEIGHT = 0.06  # fraction of an axis, for the bars of one run
AXIS_HEADROOM = 1.1  # end of an axis, relative to the largest point
PEAKS = {"peak_gpu": "peak GPU memory (MiB)", "peak_cpu": "peak CPU memory (MiB)"}
# Samples per second, in order of preference. The last rate is the Trainer's, which counts evaluation as training.
RATES = {
    "steady_samples_per_second": "samples/s, steps alone",
    "callback_samples_per_second": "samples/s, steps alone",
    "samples_per_second": "samples/s, with evaluation",
}
STYLES = [
    *((INK, "-", "o"), ("#d55e00", "--", "s"), ("#0072b2", "-.", "^"), ("#009e73", ":", "D")),
    *(("#cc79a7", (0, (5, 1)), "v"), ("#7f7f7f", (0, (3, 1, 1, 1)), "P"), ("#56b4e9", (0, (1, 1)), "X")),
    ("#b8860b", (0, (8, 2, 2, 2)), "*"),
]

STYLE: Any = SVG_STYLE | {"font.size": 11, "hatch.color": "black"}
# The colours of texts in page.css. An image cannot inherit them
COLOURS = """<style>svg:root { color: #000 }
@media (prefers-color-scheme: dark) { svg:root { color: #cfd0d0 } }</style>"""

Points = list[tuple[float, float]]


def draw_plots(table: Table) -> list[Plot]:
    """Draw the plots for which the table has values."""
    plots = []
    with matplotlib.rc_context(STYLE):
        for name in table.definition.plots:
            draw, description = DRAWINGS[name]
            if figure := draw(table):
                plots.append(Plot(as_svg(figure), f"{table.definition.title}: {description}"))
    return plots


def as_svg(figure: Figure) -> bytes:
    """Return the figure as SVG with a transparent ground and the ink of the mode. Equal figures have equal bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub("<style.*?</style>", COLOURS, out.getvalue(), count=1, flags=re.DOTALL)
    return svg.replace(INK, "currentColor").encode()


def new_figure(parts: int = 1, legend_lines: int = 0) -> tuple[Figure, list[Axes]]:
    """Create a figure with some axes one below the other, narrow enough for a phone."""
    figure = Figure(figsize=(FIGURE_WIDTH, HEIGHT * parts + LEGEND_LINE * legend_lines), layout="constrained")
    axes = list(figure.subplots(parts, 1, squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def legend_name(row: TableRow) -> str:
    """Return the row's name. A status other than completed, or "not comparable", is added in parentheses."""
    name = row.name or row.label
    if row.run and not row.run.completed:
        return f"{name} ({row.run.status})"
    return f"{name} (not comparable)" if row.mismatches else name


def drawable_number(table: Table, row: TableRow, column: str) -> float | None:
    """Return the number of a completed run in this column, or None if it is missing or not finite."""
    if column not in table.definition.columns or not row.run or not row.run.completed:
        return None
    number = row.cells[table.definition.columns.index(column)].number
    return number if number is not None and math.isfinite(number) else None


@dataclass
class Curve:
    """The training or evaluation losses of one run, or of several runs whose losses are equal."""

    kind: str
    points: Points
    style: tuple
    names: list[str]

    @property
    def label(self) -> str:
        equal = " (equal)" if len(self.names) > 1 else ""
        return textwrap.fill(f"{'; '.join(self.names)}{equal}, {self.kind}", TEXT_WIDTH)


def draw_loss(table: Table) -> Figure | None:
    """Draw the logged training loss as lines and the evaluation loss as markers, over epochs.

    Curves whose printed numbers are equal are drawn once, in the style of the first run.
    """
    curves: dict[tuple, Curve] = {}  # kind and printed numbers -> curve
    runs = [(row, row.run) for row in table.rows if row.run]
    for (row, run), style in zip(runs, cycle(STYLES), strict=False):
        for kind, points in (("training", training_losses(run)), ("evaluation", evaluation_losses(run))):
            if points:
                printed = kind, *(f"{epoch:{PRINTED}} {loss:{PRINTED}}" for epoch, loss in points)
                curves.setdefault(printed, Curve(kind, points, style, [])).names.append(legend_name(row))
    if not curves:
        return None
    labels = [curve.label for curve in curves.values()]
    figure, (axis,) = new_figure(legend_lines=sum(label.count("\n") + 1 for label in labels))
    for curve, label in zip(curves.values(), labels, strict=True):
        colour, dashes, marker = curve.style
        if curve.kind == "training":
            marker = "x" if len(curve.points) == 1 else ""  # A line with one point would be invisible.
        else:
            dashes = "none"
        axis.plot(*zip(*curve.points, strict=True), color=colour, ls=dashes, marker=marker, label=label)
    axis.set(xlabel="epoch", ylabel="loss (nats per token)", xlim=(0, None))
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    return figure


def training_losses(run: ReportedRun) -> Points:
    """Return (epoch, loss) for each logged step."""
    logged = [entry for entry in entries(find_log(run.folder, run.job_id)) if {"epoch", "loss"} <= entry.keys()]
    return [(entry["epoch"], entry["loss"]) for entry in logged if math.isfinite(entry["loss"])]


def evaluation_losses(run: ReportedRun) -> Points:
    return [(each.epoch, each.loss) for each in run.record.eval if each.loss is not None and math.isfinite(each.loss)]


def draw_memory(table: Table) -> Figure | None:
    """Draw GPU memory, GPU power and CPU memory over time, with a marker at the peak memory of each run.

    A run's line is the GPU (node) with the highest peak memory. Bars above the power show evaluations and saves.
    """
    runs = [(legend_name(row), row.run) for row in table.rows if row.run]
    gpus = [read_logged(run, "GPU") for _, run in runs]
    nodes = [read_logged(run, "CPU") for _, run in runs]
    curves = {
        "GPU memory used (MiB)": [gpu.memory for gpu in gpus],
        "GPU power (W)": [gpu.power for gpu in gpus],
        "CPU memory used (MiB)": [node.memory for node in nodes],
    }
    labels = [label for label in curves if any(curves[label])]
    if not labels:
        return None
    figure, axes = new_figure(len(labels), legend_lines=1 + len(runs))
    handles: dict[str, Artist] = {}
    peak_texts: dict[str, list[str]] = {}
    for axis, label in zip(axes, labels, strict=True):
        for (name, _), points, (colour, dashes, marker) in zip(runs, curves[label], cycle(STYLES), strict=False):
            if not points:
                continue
            axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.2)
            if "memory" in label:
                top = max(points, key=lambda point: point[1])
                (handles[name],) = axis.plot(*top, color=colour, linestyle=dashes, marker=marker)
                peak_texts.setdefault(name, []).append(f"{label.split()[0]} {top[1]:,.0f} MiB")
        axis.set(xlabel="time (s)", ylabel=label, xlim=(0, None), ylim=(0, None))
        if "power" in label:
            draw_pauses(axis, [run for _, run in runs], gpus)
    names = [textwrap.fill(f"{name}: {', '.join(texts)}", TEXT_WIDTH) for name, texts in peak_texts.items()]
    figure.legend(list(handles.values()), names, title="peak (marked)", alignment="left", loc="outside lower left",
                  frameon=False, fontsize="small", title_fontsize="small")  # fmt: skip
    return figure


@dataclass
class Logged:
    """Curves of the GPU or node with the highest peak memory of a run. They are empty if there is no log.

    start: seconds of the first sample, on the clock of its node.
    """

    memory: Points
    power: Points
    start: float


def read_logged(run: ReportedRun, kind: str) -> Logged:
    """Read the curves of a run. kind: `GPU` or `CPU`."""
    gpu_logs, cpu_logs = memory_log_paths(run.folder, run.job_id)
    logs = map(read_gpu_log, gpu_logs) if kind == "GPU" else map(read_cpu_log, cpu_logs)
    series = [(log.peak(name), log, name) for log in logs for name in log.names()]
    if not series or (kind == "GPU" and isinstance(run.gpu, Missing) and run.gpu is not NO_MEMORY):
        return Logged([], [], 0)
    _, log, name = max(series, key=lambda entry: entry[0])
    return Logged(log.curve(name), log.power_curve(name), log.start(name))


def draw_pauses(axis: Axes, runs: list[ReportedRun], gpus: list[Logged]) -> None:
    """Draw the evaluations and saves of each run as a line of bars above the axis."""
    found = [
        (run.record.pauses, gpu.start, style)
        for run, gpu, style in zip(runs, gpus, cycle(STYLES), strict=False)
        if run.record.pauses and gpu.power
    ]
    if not found:
        return
    above = axis.inset_axes((0, 1.02, 1, PAUSES_HEIGHT * len(found)), sharex=axis)
    above.set(ylim=(len(found), 0))
    above.set_axis_off()
    for place, (pauses, start, (colour, _, _)) in enumerate(found):
        for pause in pauses:
            # Convert the time at the end of summer time, as the log continues without it
            began = local_seconds(pause.started.astimezone(pauses[0].started.tzinfo)) - start
            seconds = (pause.finished - pause.started).total_seconds()
            above.broken_barh([(began, seconds)], (place, 0.8), edgecolor=colour, linewidth=0.8,
                              facecolor=colour if pause.what == "evaluation" else "none",
                              hatch="" if pause.what == "evaluation" else "//////", hatchcolor=colour)  # fmt: skip
    note = "Bars above the power: evaluation (filled) and saving (hatched) of each run, in the order of the legend."
    axis.set_xlabel(below("time (s)", note))


def draw_held(table: Table) -> Figure | None:
    """Draw the parameters, gradients and optimizer state that a rank held, with a mark at the predicted sum."""
    completed = [row for row in reversed(table.rows) if row.run and row.run.completed]
    sizes = [state_parts(row, "held") for row in completed]
    bars = [(row, parts) for row, parts in zip(completed, sizes, strict=True) if parts]
    if not bars:
        return None
    rows, measured = zip(*bars, strict=True)
    figure, (axis,) = new_figure(legend_lines=2 + 3 * max(0, len(rows) - MANY_BARS))
    handles: list = []
    left = [0.0] * len(rows)
    for part, widths in zip(HELD, zip(*measured, strict=True), strict=True):
        style: dict[str, Any] = {"height": 0.6, "edgecolor": INK, "linewidth": 0.5} | PARTS[part]
        handles.append(axis.barh(range(len(rows)), widths, left=left, label=part, **style))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.bar_label(handles[-1], [format_number(size) for size in left], padding=9, fontsize="small")
    predictions = [(state_parts(row, "estimated"), place) for place, row in enumerate(rows)]
    if marks := [(sum(parts), place) for parts, place in predictions if parts]:
        style = {"color": "#d62728", "ls": "none", "marker": "|", "ms": 20, "mew": 2.5}
        handles += axis.plot(*zip(*marks, strict=True), label="predicted sum", **style)
    partial = [legend_name(row) for row, parts in zip(completed, sizes, strict=True) if not parts]
    note = f"Left out, a part was not measured: {', '.join(partial)}." if partial else ""
    axis.set_xlabel(below("model state that a rank held (MiB)", note))
    name_bars(axis, rows)
    figure.legend(handles=handles, loc="outside lower left", ncols=2, markerscale=0.5, frameon=False, fontsize="small")
    return figure


def state_parts(row: TableRow, kind: str) -> list[float] | None:
    """Return the MiB of each part of the model state that a rank holds, None if a part is missing.

    kind: held or estimated.
    """
    assert row.run
    parts = [metric_value(column.replace("held", kind), row.run) for column in HELD.values()]
    return None if any(isinstance(part, Missing) for part in parts) else parts


def draw_bars(table: Table, labels: dict[str, str]) -> Figure | None:
    """Draw some columns as bars. Runs with offload have hatched bars. labels: column -> label of its axis."""
    bars = {column: [(row, drawable_number(table, row, column)) for row in reversed(table.rows)] for column in labels}
    bars = {column: known for column, found in bars.items() if (known := [bar for bar in found if bar[1] is not None])}
    if not bars:
        return None
    figure, axes = new_figure(len(bars), legend_lines=3 * max(0, len(table.rows) - MANY_BARS))
    for axis, (column, known) in zip(axes, bars.items(), strict=True):
        rows, numbers = zip(*known, strict=True)
        hatches = ["////" if "offload" in row.label else "" for row in rows]
        drawn = axis.barh(range(len(rows)), numbers, color="#9dc3e6", edgecolor=INK, linewidth=0.5, hatch=hatches)
        places = decimals(map(Cell, numbers))
        axis.bar_label(drawn, [format_rounded(number, places) for number in numbers], padding=3, fontsize="small")
        axis.set_xlabel(labels[column])
        name_bars(axis, rows)
    return figure


def name_bars(axis: Axes, rows: tuple[TableRow, ...]) -> None:
    """Name horizontal bars after their rows, with room for the number at the end of a bar, and without lines."""
    names = [textwrap.shorten(legend_name(row), 3 * BAR_NAME_WIDTH, placeholder=" ...") for row in rows]
    # Equal runs, or names that differ only in what was cut, have their job's number
    ends = [
        f", job {row.jobs.rpartition('-')[2]}" if names.count(name) > 1 else ""
        for row, name in zip(rows, names, strict=True)
    ]
    labels = [textwrap.fill(name + end, BAR_NAME_WIDTH) for name, end in zip(names, ends, strict=True)]
    axis.set_yticks(range(len(rows)), labels)
    axis.margins(x=0.18)
    axis.locator_params(axis="x", nbins=MAX_TICKS)
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)


def draw_throughput(table: Table) -> Figure | None:
    """Draw samples per second over GPUs, with a line for ideal scaling from the run with the fewest GPUs."""
    rate = choose_rate(table)
    points = points_over_gpus(table, rate)
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure()
    gpus, measured = zip(*points, strict=True)
    ideal = [measured[0] / gpus[0] * number for number in gpus]
    axis.plot(gpus, ideal, color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, measured, color=INK, marker="o", label="measured")
    top = AXIS_HEADROOM * max(*ideal, *measured)
    axis.set(xlabel="GPUs", ylabel=RATES[rate], xticks=gpus, ylim=(0, top))
    axis.legend(frameon=False)
    return figure


def draw_speed(table: Table) -> Figure | None:
    """Draw speed over peak GPU memory (CPU memory if no run has a GPU). Better runs are further up and to the left."""
    kind = "GPU" if any(drawable_number(table, row, "peak_gpu") for row in table.rows) else "CPU"
    rate = choose_rate(table)
    points: Points = []
    labels = []
    rows = [row for row in table.rows if row.run]
    for row, style in zip(rows, cycle(STYLES), strict=False):  # A run has the same style in all plots of the table.
        point = drawable_number(table, row, f"peak_{kind.lower()}"), drawable_number(table, row, rate)
        if not row.mismatches and point[0] and point[1]:
            points.append((point[0], point[1]))
            labels.append((row.label, style))
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure(legend_lines=len(points))
    for point, (label, (colour, _, marker)) in zip(points, labels, strict=True):
        axis.plot(*point, color=colour, marker=marker, linestyle="none", label=label)
    largest, fastest = map(max, zip(*points, strict=True))
    axis.set(xlabel=f"peak {kind} memory (MiB)", ylabel=RATES[rate])
    axis.set(xlim=(0, AXIS_HEADROOM * largest), ylim=(0, AXIS_HEADROOM * fastest))
    axis.locator_params(axis="x", nbins=MAX_TICKS)
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    return figure


def choose_rate(table: Table) -> str:
    """Return the first rate in RATES that at least two runs have."""
    return next((rate for rate in RATES if len(points_over_gpus(table, rate)) > 1), "samples_per_second")


def points_over_gpus(table: Table, column: str) -> list[tuple[int, float]]:
    """Return (GPUs, value) for the completed runs that compare, sorted by the number of GPUs."""
    found = [
        (row.run.record.world_size, drawable_number(table, row, column))
        for row in table.rows
        if row.run and not row.mismatches
    ]
    return sorted((gpus, number) for gpus, number in found if gpus and number)


def below(label: str, note: str) -> str:
    """Return the text below an axis: its label, and the note if there is one."""
    return f"{label}\n{textwrap.fill(note, NOTE_WIDTH)}".strip()


DRAWINGS: dict[str, tuple[Any, str]] = {  # the plots that a table may name, each with a description
    "loss": (draw_loss, "training and evaluation loss over epochs"),
    "memory": (draw_memory, "memory and GPU power over time, with the peak memory of each run"),
    "held": (draw_held, "parameters, gradients and optimizer state that a rank held, as stacked bars"),
    "peaks": (partial(draw_bars, labels=PEAKS), "peak memory as bars"),
    "rates": (partial(draw_bars, labels=RATES), "samples per second as bars"),
    "throughput": (draw_throughput, "samples per second over GPUs, next to ideal scaling"),
    "speed": (draw_speed, "speed over peak memory"),
}
