"""The plots of a table, as PNG. Lines and bars are told apart by dashes, markers and hatches, not by colour alone.

Each has an alternative text that says what is seen. Lines over GPUs and the points of a scatter compare runs with each
other: those that do not compare are left out, and the plot says so.
"""

import math
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reporting.memory_logs import logs_of, read_cpu_log, read_gpu_log
from reporting.metrics import METRICS, shown
from reporting.runs import Missing, Run
from reporting.tables import Row, Table
from reporting.trainer_log import entries, log_of

DPI = 110
FIGURE_WIDTH = 5.8  # inches, of which letters of 11 points can be read on a phone
HEIGHT = 3.4
LEGEND_LINE = 0.24
POINTS = 2000  # of a curve: more than a plot has pixels
NEAR = 0.06  # of an axis: points that are nearer have one label
STEADY, TRAINERS = "steady_samples_per_second", "samples_per_second"
RATE_NAMES = {STEADY: "samples/s, steps alone", TRAINERS: "samples/s, with evaluation"}
LOOKS = [
    *(("#000000", "-", "o"), ("#d55e00", "--", "s"), ("#0072b2", "-.", "^"), ("#009e73", ":", "D")),
    *(("#cc79a7", (0, (5, 1)), "v"), ("#7f7f7f", (0, (3, 1, 1, 1)), "P"), ("#56b4e9", (0, (1, 1)), "X")),
    ("#b8860b", (0, (8, 2, 2, 2)), "*"),
]

Points = list[tuple[float, float]]


class Plot(NamedTuple):
    figure: Figure
    alt: str  # what is seen


def draw(table: Table, folder: Path) -> list[tuple[Path, str]]:
    """Write the plots for which the table has values to ``<folder>/<table>-<plot>.png``; each with what is seen."""
    images = []
    rows = [row for row in table.rows if row.run]
    with matplotlib.rc_context({"font.size": 11}):
        for name in table.plots:
            if plot := DRAWINGS[name](rows):
                path = folder / f"{table.name}-{name}.png"
                plot.figure.savefig(path, dpi=DPI)
                images.append((path, plot.alt))
    return images


def new_figure(parts: int = 1, legend_lines: int = 0) -> tuple[Figure, list[Axes]]:
    """Parts one below the other, as wide as a phone can show."""
    figure = Figure(figsize=(FIGURE_WIDTH, HEIGHT * parts + LEGEND_LINE * legend_lines), layout="constrained")
    FigureCanvasAgg(figure)
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
    return row.label if row.compares else f"{row.label} (does not compare)"


def value(row: Row, metric: str) -> float | None:
    """The metric of a completed run, None without one; a loss that diverged cannot be drawn."""
    found = METRICS[metric].read(row.repeats[0]) if row.run and row.run.completed else None
    return found if isinstance(found, int | float) and math.isfinite(found) else None


def thinned(points: Points) -> Points:
    """As many as a plot can show, the largest of those side by side."""
    each = 1 + len(points) // POINTS
    return [max(points[i : i + each], key=lambda point: point[1]) for i in range(0, len(points), each)]


def loss_plot(rows: list[Row]) -> Plot | None:
    """Training loss as logged (line) and evaluation loss (markers) over epochs."""
    curves = [(row, training_losses(row.repeats[0]), evaluation_losses(row.repeats[0])) for row in rows]
    drawn = sum(bool(steps) + bool(tests) for _, steps, tests in curves)
    if not drawn:
        return None
    figure, (axis,) = new_figure(legend_lines=drawn)
    said = []
    for (row, steps, tests), (colour, dashes, marker) in zip(curves, cycle(LOOKS), strict=False):
        name = name_of(row)
        parts = []
        if steps:
            alone = "x" if len(steps) == 1 else ""  # a line of one point has no length
            axis.plot(*zip(*steps, strict=True), color=colour, ls=dashes, marker=alone, label=f"{name}, training")
            parts.append("training " + " to ".join(dict.fromkeys([shown(steps[0][1]), shown(steps[-1][1])])))
        if tests:
            axis.plot(*zip(*tests, strict=True), color=colour, ls="none", marker=marker, label=f"{name}, evaluation")
            parts.append("evaluation " + " then ".join(shown(loss) for _, loss in tests))
        said += [f"{name}: {', '.join(parts)}"] if parts else []
    axis.set(xlabel="epoch", ylabel="loss (nats per token)")
    axis.set_xlim(left=0)
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    return Plot(figure, f"Loss over epochs. {'; '.join(said)}.")


def training_losses(run: Run) -> Points:
    """(epoch, loss) of the logged steps."""
    logged = [(entry["epoch"], entry["loss"]) for entry in entries(log_of(run.folder, run.job_id))
              if {"epoch", "loss"} <= entry.keys() and math.isfinite(entry["loss"])]  # fmt: skip
    return logged[:: 1 + len(logged) // POINTS]


def evaluation_losses(run: Run) -> Points:
    return [(each.epoch, each.loss) for each in run.record.eval if each.loss is not None and math.isfinite(each.loss)]


def memory_plot(rows: list[Row]) -> Plot | None:
    """GPU and CPU memory over time, the largest of all GPUs (nodes) at each sample, the peak of each run marked."""
    curves = {kind: [curve(row.repeats[0], kind) for row in rows] for kind in ("GPU", "CPU")}
    kinds = [kind for kind in curves if any(curves[kind])]
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds), legend_lines=1 + len(rows))
    handles: dict[str, Artist] = {}
    peak_texts: dict[str, list[str]] = {}
    for axis, kind in zip(axes, kinds, strict=True):
        for row, points, (colour, dashes, marker) in zip(rows, curves[kind], cycle(LOOKS), strict=False):
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.2)
                top = max(points, key=lambda point: point[1])
                (handles[name_of(row)],) = axis.plot(*top, color=colour, linestyle=dashes, marker=marker)
                peak_texts.setdefault(name_of(row), []).append(f"{kind} {top[1]:,.0f} MiB")
        axis.set(xlabel="time (s)", ylabel=f"{kind} memory used (MiB)")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    said = [f"{name}: {', '.join(texts)}" for name, texts in peak_texts.items()]
    figure.legend(list(handles.values()), said, title="peak (marked)", alignment="left", loc="outside lower left",
                  frameon=False, fontsize="small", title_fontsize="small")  # fmt: skip
    return Plot(figure, f"{' and '.join(kinds)} memory over time. Peaks of {'; '.join(said)}.")


def curve(run: Run, kind: str) -> Points:
    """(seconds, MiB) of the GPU or node with the highest peak."""
    if kind == "GPU" and isinstance(run.gpu.peak, Missing):
        return []
    gpu_logs, cpu_logs = logs_of(run.folder, run.job_id)
    logs = map(read_gpu_log, gpu_logs) if kind == "GPU" else map(read_cpu_log, cpu_logs)
    series = [(log.peak(name), log, name) for log in logs for name in log.names()]
    if not series:
        return []
    _, log, name = max(series, key=lambda entry: entry[0])
    return thinned(log.curve(name))


def peaks(rows: list[Row]) -> Plot | None:
    """Peak memory of GPU and CPU as bars; offloaded runs are hatched."""
    metrics = {"GPU": "peak_gpu", "CPU": "peak_cpu"}
    kinds = [kind for kind, metric in metrics.items() if any(value(row, metric) for row in rows)]
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds))
    said = []
    for axis, kind in zip(axes, kinds, strict=True):
        bars_of = {name_of(row): mib for row in reversed(rows) if (mib := value(row, metrics[kind])) is not None}
        hatches = ["////" if "offload" in label else "" for label in bars_of]
        bars = axis.barh(list(bars_of), list(bars_of.values()), color="#cccccc", edgecolor="black", hatch=hatches)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        axis.set(xlabel=f"peak {kind} memory (MiB)")
        axis.margins(x=0.18)
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
        said.append(f"{kind}: " + "; ".join(f"{name} {mib:,.0f} MiB" for name, mib in reversed(bars_of.items())))
    return Plot(figure, f"Peak memory as bars. {'. '.join(said)}.")


def throughput(rows: list[Row]) -> Plot | None:
    """Samples per second over GPUs, with the line of the first run's rate per GPU."""
    metric = rate_of(rows)
    points = by_gpus(rows, metric)
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure()
    gpus, rates = zip(*points, strict=True)
    ideal = [rates[0] / gpus[0] * n for n in gpus]
    axis.plot(gpus, ideal, color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, rates, color="black", marker="o", label="measured")
    left_out = left_out_of(rows, metric)
    axis.set(xlabel=f"GPUs\n{left_out}".strip(), ylabel=RATE_NAMES[metric], xticks=gpus)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    measured = over_gpus([(n, f"{shown(rate)} samples/s") for n, rate in points])
    ends = f"ideal {shown(ideal[-1])} on {gpus[-1]}"
    return Plot(figure, f"Throughput ({RATE_NAMES[metric]}) over GPUs: {measured}; {ends}. {left_out}".strip())


def efficiency(rows: list[Row]) -> Plot | None:
    """Efficiency against the run with the fewest GPUs: throughput per GPU, or runtime where the model grows too."""
    layers = {value(row, "num_layers") for row in rows}
    by_time = len(layers - {None}) > 1
    metric = "runtime" if by_time else rate_of(rows)
    points = by_gpus(rows, metric)
    if len(points) < 2:
        return None
    gpus, values = zip(*points, strict=True)
    percent = [values[0] / v * 100 if by_time else v / n / (values[0] / gpus[0]) * 100 for n, v in points]
    figure, (axis,) = new_figure()
    axis.axhline(100, color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, percent, color="black", marker="o", label="runtime" if by_time else RATE_NAMES[metric])
    first = f"{gpus[0]} GPU{'s' if gpus[0] > 1 else ''}"
    left_out = left_out_of(rows, metric)
    axis.set(xlabel=f"GPUs\n{left_out}".strip(), ylabel=f"efficiency against {first} (%)", xticks=gpus)
    axis.set_ylim(0, max(110, *percent) * 1.02)
    axis.legend(frameon=False)
    said = over_gpus([(n, f"{number:.0f} %") for n, number in zip(gpus, percent, strict=True)])
    return Plot(figure, f"Efficiency against {first}, ideal 100 %: {said}. {left_out}".strip())


def speed(rows: list[Row]) -> Plot | None:
    """Speed over peak memory, of the GPU where there is one: what is up and to the left is better."""
    kind = "GPU" if any(value(row, "peak_gpu") for row in rows) else "CPU"
    metric = rate_of(rows)
    points = []
    looks = []  # those of the same rows in the other plots of the table
    for row, look in zip(rows, cycle(LOOKS), strict=False):
        mib, rate = value(row, f"peak_{kind.lower()}"), value(row, metric)
        if row.compares and mib and rate:
            points.append((row.label, mib, rate))
            looks.append(look)
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure(legend_lines=len(points) + 1)
    for number, ((label, mib, rate), (colour, _, marker)) in enumerate(zip(points, looks, strict=True), 1):
        axis.plot(mib, rate, color=colour, marker=marker, linestyle="none", label=f"{number}  {label}")
    best = pareto_front([(mib, rate) for _, mib, rate in points])
    most = max(mib for _, mib, _ in points)
    if most > best[0][0]:  # else it has no length
        steps = [*best, (most, best[-1][1])]
        axis.step(*zip(*steps, strict=True), where="post", color="#777777", linestyle="--", linewidth=1,
                  label="Pareto front: nothing is faster in less memory", zorder=0)  # fmt: skip
    left_out = left_out_of(rows, metric)
    axis.set(xlabel=f"peak {kind} memory (MiB)\n{left_out}".strip(), ylabel=RATE_NAMES[metric])
    axis.margins(x=0.1, y=0.1)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    number_points(axis, [(mib, rate) for _, mib, rate in points])
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    said = "; ".join(f"{label} {shown(rate)} samples/s in {mib:,.0f} MiB" for label, mib, rate in points)
    front = ", ".join(label for label, mib, rate in points if (mib, rate) in best)
    seen = f"Speed over peak {kind} memory: {said}. On the Pareto front: {front}. {left_out}"
    return Plot(figure, seen.strip())


def number_points(axis: Axes, points: Points) -> None:
    """The numbers of the points beside them; points that lie together have theirs in one label."""
    width, height = axis.get_xlim()[1] * NEAR, axis.get_ylim()[1] * NEAR
    labels: dict[tuple[float, float], list[str]] = {}
    for number, (x, y) in enumerate(points, 1):
        place = next((p for p in labels if abs(p[0] - x) < width and abs(p[1] - y) < height), (x, y))
        labels.setdefault(place, []).append(str(number))
    for place, numbers in labels.items():
        axis.annotate(", ".join(numbers), place, xytext=(6, 4), textcoords="offset points", fontsize="small")


def pareto_front(points: Points) -> Points:
    """Those (memory, speed) beside which no other is as fast in less memory, or faster in as much; by rising memory."""
    front: Points = []
    for mib, rate in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or rate > front[-1][1]:
            front.append((mib, rate))
    return front


def rate_of(rows: list[Row]) -> str:
    """The rate of the steps alone, where two runs or more have it; the Trainer's counts evaluation as training."""
    return STEADY if len([row for row in rows if row.compares and value(row, STEADY)]) > 1 else TRAINERS


def by_gpus(rows: list[Row], metric: str) -> list[tuple[int, float]]:
    """(GPUs, value) of the completed runs that compare, by rising number of GPUs."""
    found = [(value(row, "gpus"), value(row, metric)) for row in rows if row.compares]
    return sorted((int(gpus), number) for gpus, number in found if gpus and number)


def over_gpus(points: list[tuple[int, str]]) -> str:
    """Such as "10.1 samples/s on 1 GPU, 18.9 samples/s on 2"."""
    (first, text), *rest = points
    return ", ".join([f"{text} on {first} GPU{'s' if first > 1 else ''}", *(f"{text} on {n}" for n, text in rest)])


def left_out_of(rows: list[Row], metric: str) -> str:
    """Which completed runs a line or a scatter leaves out, empty when it leaves out none."""
    completed = [row for row in rows if row.run and row.run.completed]
    apart = [row.label for row in completed if not row.compares]
    without = [row.label for row in completed if row.compares and not value(row, metric)]
    found = {"does not compare": apart, f"no {RATE_NAMES.get(metric, metric)}": without}
    return " ".join(f"Left out, {why}: {', '.join(labels)}." for why, labels in found.items() if labels)


DRAWINGS = {
    "loss": loss_plot,
    "memory": memory_plot,
    "peaks": peaks,
    "throughput": throughput,
    "efficiency": efficiency,
    "speed": speed,
}
