"""The plots of a table, as PNG. Lines and bars are told apart by dashes, markers and hatches, not by colour alone.

The numbers are those of the table's cells. Lines over GPUs and the points of a scatter compare runs with each other.
Runs that do not compare are left out, and the plot names them.
"""

import math
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from records.memory_logs import memory_log_paths, read_cpu_log, read_gpu_log
from reporting.runs import Missing, Run
from reporting.tables import Row, Table
from reporting.trainer_log import entries, log_of

DPI = 110
FIGURE_WIDTH = 5.8  # inches, of which letters of 11 points can be read on a phone
HEIGHT = 3.4
LEGEND_LINE = 0.24
NEAR = 0.06  # of an axis: points that are nearer have one label
ROOM = 1.1  # between the largest point and the end of an axis
RATES = {  # the first that two runs or more have; the Trainer's counts evaluation as training
    "steady_samples_per_second": "samples/s, steps alone",
    "callback_samples_per_second": "samples/s, steps alone",
    "samples_per_second": "samples/s, with evaluation",
}
LOOKS = [
    *(("#000000", "-", "o"), ("#d55e00", "--", "s"), ("#0072b2", "-.", "^"), ("#009e73", ":", "D")),
    *(("#cc79a7", (0, (5, 1)), "v"), ("#7f7f7f", (0, (3, 1, 1, 1)), "P"), ("#56b4e9", (0, (1, 1)), "X")),
    ("#b8860b", (0, (8, 2, 2, 2)), "*"),
]

Points = list[tuple[float, float]]


def draw(table: Table, folder: Path) -> list[tuple[Path, str]]:
    """Write the plots for which the table has values to ``<folder>/<table>-<plot>.png``. Returns their descriptions."""
    images = []
    with matplotlib.rc_context({"font.size": 11}):
        for name in table.definition.plots:
            drawing, seen = DRAWINGS[name]
            if figure := drawing(table):
                path = folder / f"{table.definition.id}-{name}.png"
                figure.savefig(path, dpi=DPI)
                images.append((path, f"{table.definition.title}: {seen}"))
    return images


def new_figure(parts: int = 1, legend_lines: int = 0) -> tuple[Figure, list[Axes]]:
    """Parts one below the other, as wide as a phone can show."""
    figure = Figure(figsize=(FIGURE_WIDTH, HEIGHT * parts + LEGEND_LINE * legend_lines), layout="constrained")
    axes = list(figure.subplots(parts, 1, squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def name_of(row: Row) -> str:
    """The label, and what a reader of its curve must know."""
    if row.run and not row.run.completed:
        return f"{row.label} ({row.run.status})"
    return f"{row.label} (does not compare)" if row.mismatches else row.label


def number_in(table: Table, row: Row, column: str) -> float | None:
    """Return the number of a completed run, None where there is none that can be drawn."""
    if column not in table.definition.columns or not row.run or not row.run.completed:
        return None
    number = row.cells[table.definition.columns.index(column)].number
    return number if number is not None and math.isfinite(number) else None


def loss_plot(table: Table) -> Figure | None:
    """Training loss as logged (line) and evaluation loss (markers) over epochs."""
    runs = [(row, row.run) for row in table.rows if row.run]
    curves = [(name_of(row), training_losses(run), evaluation_losses(run)) for row, run in runs]
    drawn = sum(bool(steps) + bool(tests) for _, steps, tests in curves)
    if not drawn:
        return None
    figure, (axis,) = new_figure(legend_lines=drawn)
    for (name, steps, tests), (colour, dashes, marker) in zip(curves, cycle(LOOKS), strict=False):
        if steps:
            alone = "x" if len(steps) == 1 else ""  # a line of one point has no length
            axis.plot(*zip(*steps, strict=True), color=colour, ls=dashes, marker=alone, label=f"{name}, training")
        if tests:
            axis.plot(*zip(*tests, strict=True), color=colour, ls="none", marker=marker, label=f"{name}, evaluation")
    axis.set(xlabel="epoch", ylabel="loss (nats per token)", xlim=(0, None))
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    return figure


def training_losses(run: Run) -> Points:
    """(epoch, loss) of the logged steps."""
    logged = [entry for entry in entries(log_of(run.folder, run.job_id)) if {"epoch", "loss"} <= entry.keys()]
    return [(entry["epoch"], entry["loss"]) for entry in logged if math.isfinite(entry["loss"])]


def evaluation_losses(run: Run) -> Points:
    return [(each.epoch, each.loss) for each in run.record.eval if each.loss is not None and math.isfinite(each.loss)]


def memory_plot(table: Table) -> Figure | None:
    """GPU and CPU memory over time, the largest of all GPUs (nodes) at each sample, the peak of each run marked."""
    runs = [(name_of(row), row.run) for row in table.rows if row.run]
    curves = {kind: [curve(run, kind) for _, run in runs] for kind in ("GPU", "CPU")}
    kinds = [kind for kind in curves if any(curves[kind])]
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds), legend_lines=1 + len(runs))
    handles: dict[str, Artist] = {}
    peak_texts: dict[str, list[str]] = {}
    for axis, kind in zip(axes, kinds, strict=True):
        for (name, _), points, (colour, dashes, marker) in zip(runs, curves[kind], cycle(LOOKS), strict=False):
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.2)
                top = max(points, key=lambda point: point[1])
                (handles[name],) = axis.plot(*top, color=colour, linestyle=dashes, marker=marker)
                peak_texts.setdefault(name, []).append(f"{kind} {top[1]:,.0f} MiB")
        axis.set(xlabel="time (s)", ylabel=f"{kind} memory used (MiB)", xlim=(0, None), ylim=(0, None))
    labels = [f"{name}: {', '.join(texts)}" for name, texts in peak_texts.items()]
    figure.legend(list(handles.values()), labels, title="peak (marked)", alignment="left", loc="outside lower left",
                  frameon=False, fontsize="small", title_fontsize="small")  # fmt: skip
    return figure


def curve(run: Run, kind: str) -> Points:
    """(seconds, MiB) of the GPU or node with the highest peak."""
    if kind == "GPU" and isinstance(run.gpu, Missing):
        return []
    gpu_logs, cpu_logs = memory_log_paths(run.folder, run.job_id)
    logs = map(read_gpu_log, gpu_logs) if kind == "GPU" else map(read_cpu_log, cpu_logs)
    series = [(log.peak(name), log, name) for log in logs for name in log.names()]
    if not series:
        return []
    _, log, name = max(series, key=lambda entry: entry[0])
    return log.curve(name)


def peaks(table: Table) -> Figure | None:
    """Peak memory of GPU and CPU as bars; offloaded runs are hatched."""
    bars_of = {}
    for kind in ("GPU", "CPU"):
        found = {name_of(row): number_in(table, row, f"peak_{kind.lower()}") for row in reversed(table.rows)}
        if known := {name: mib for name, mib in found.items() if mib is not None}:
            bars_of[kind] = known
    if not bars_of:
        return None
    figure, axes = new_figure(len(bars_of))
    for axis, (kind, bars) in zip(axes, bars_of.items(), strict=True):
        hatches = ["////" if "offload" in label else "" for label in bars]
        drawn = axis.barh(list(bars), list(bars.values()), color="#cccccc", edgecolor="black", hatch=hatches)
        axis.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize="small")
        axis.set(xlabel=f"peak {kind} memory (MiB)")
        axis.margins(x=0.18)
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
    return figure


def throughput(table: Table) -> Figure | None:
    """Samples per second over GPUs, with the line of the first run's rate per GPU."""
    rate = rate_of(table)
    points = points_over_gpus(table, rate)
    ideal = [points[0][1] / points[0][0] * gpus for gpus, _ in points]
    return line_over_gpus(points, ideal, RATES[rate], left_out_note(table, rate))


def efficiency(table: Table) -> Figure | None:
    """The last column of efficiencies in which two runs have one."""
    for column, header in reversed([*zip(table.definition.columns, table.definition.headers, strict=True)]):
        points = points_over_gpus(table, column)
        if "efficiency." in column and len(points) > 1:
            return line_over_gpus(points, [100] * len(points), header, left_out_note(table, column))
    return None


def line_over_gpus(points: list[tuple[int, float]], ideal: list[float], what: str, left_out: str) -> Figure | None:
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure()
    gpus, measured = zip(*points, strict=True)
    axis.plot(gpus, ideal, color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, measured, color="black", marker="o", label="measured")
    axis.set(xlabel=f"GPUs\n{left_out}".strip(), ylabel=what, xticks=gpus, ylim=(0, ROOM * max(*ideal, *measured)))
    axis.legend(frameon=False)
    return figure


def speed(table: Table) -> Figure | None:
    """Speed over peak memory, of the GPU where there is one: what is up and to the left is better."""
    kind = "GPU" if any(number_in(table, row, "peak_gpu") for row in table.rows) else "CPU"
    rate = rate_of(table)
    points: Points = []
    labels = []
    ran = [row for row in table.rows if row.run]
    for row, look in zip(ran, cycle(LOOKS), strict=False):  # looks as in the other plots of the table
        point = number_in(table, row, f"peak_{kind.lower()}"), number_in(table, row, rate)
        if not row.mismatches and point[0] and point[1]:
            points.append((point[0], point[1]))
            labels.append((row.label, look))
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure(legend_lines=len(points) + 1)
    for number, (point, (label, (colour, _, marker))) in enumerate(zip(points, labels, strict=True), 1):
        axis.plot(*point, color=colour, marker=marker, linestyle="none", label=f"{number}  {label}")
    best = pareto_front(points)
    most, fastest = map(max, zip(*points, strict=True))
    if most > best[0][0]:  # else it has no length
        steps = [*best, (most, best[-1][1])]
        axis.step(*zip(*steps, strict=True), where="post", color="#777777", linestyle="--", linewidth=1,
                  label="Pareto front: nothing is faster in less memory", zorder=0)  # fmt: skip
    below = f"peak {kind} memory (MiB)\n{left_out_note(table, rate)}".strip()
    axis.set(xlabel=below, ylabel=RATES[rate], xlim=(0, ROOM * most), ylim=(0, ROOM * fastest))
    number_points(axis, points)
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    return figure


def number_points(axis: Axes, points: Points) -> None:
    """Write its number next to each point. Points that are near each other share one label."""
    width, height = axis.get_xlim()[1] * NEAR, axis.get_ylim()[1] * NEAR
    labels: dict[tuple[float, float], list[str]] = {}
    for number, (x, y) in enumerate(points, 1):
        place = next((p for p in labels if abs(p[0] - x) < width and abs(p[1] - y) < height), (x, y))
        labels.setdefault(place, []).append(str(number))
    for place, numbers in labels.items():
        axis.annotate(", ".join(numbers), place, xytext=(6, 4), textcoords="offset points", fontsize="small")


def pareto_front(points: Points) -> Points:
    """Return the (memory, speed) points for which no other point is as fast in less memory, by rising memory."""
    front: Points = []
    for mib, rate in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or rate > front[-1][1]:
            front.append((mib, rate))
    return front


def rate_of(table: Table) -> str:
    """The first of the rates that two runs or more have."""
    return next((rate for rate in RATES if len(points_over_gpus(table, rate)) > 1), "samples_per_second")


def points_over_gpus(table: Table, column: str) -> list[tuple[int, float]]:
    """(GPUs, value) of the completed runs that compare, by rising number of GPUs."""
    found = [
        (row.run.record.world_size, number_in(table, row, column))
        for row in table.rows
        if row.run and not row.mismatches
    ]
    return sorted((gpus, number) for gpus, number in found if gpus and number)


def left_out_note(table: Table, column: str) -> str:
    """Name the completed runs that a line or a scatter leaves out; empty when there are none."""
    completed = [row for row in table.rows if row.run and row.run.completed]
    apart = [row.label for row in completed if row.mismatches]
    without = [row.label for row in completed if not row.mismatches and not number_in(table, row, column)]
    found = {"does not compare": apart, f"no {RATES.get(column, 'efficiency')}": without}
    return " ".join(f"Left out, {why}: {', '.join(labels)}." for why, labels in found.items() if labels)


DRAWINGS = {  # the plots that a table may name, each with a description
    "loss": (loss_plot, "training and evaluation loss over epochs"),
    "memory": (memory_plot, "memory over time, with the peak of each run"),
    "peaks": (peaks, "peak memory as bars"),
    "throughput": (throughput, "samples per second over GPUs, beside the ideal"),
    "efficiency": (efficiency, "efficiency over GPUs, beside the ideal 100 %"),
    "speed": (speed, "speed over peak memory, with the Pareto front"),
}
