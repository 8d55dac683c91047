"""The plots of a table, as PNG. Lines and bars are told apart by dashes, markers and hatches, not by colour alone.

Each has an alternative text that says what is seen. Lines over GPUs and the points of a scatter compare runs with each
other: those that do not compare are left out, and the plot says so.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reporting.memory_logs import POINTS, MemoryLog, logs_of, read_cpu_log, read_gpu_log
from reporting.metrics import METRICS, shown
from reporting.record import LARGEST_LOSS
from reporting.runs import Run
from reporting.tables import Table
from reporting.trainer_log import entries, log_of

DPI = 110
FIGURE_WIDTH = 5.8  # inches, of which letters of 11 points can be read on a phone
HEIGHT = 3.4
LEGEND_LINE = 0.24
STEADY, TRAINERS = "steady_samples_per_second", "samples_per_second"
PREDICTED = "estimated_samples_per_second"
RATE_NAMES = {STEADY: "samples/s, steps alone", TRAINERS: "samples/s, with evaluation"}
LOOKS = [
    *(("#000000", "-", "o"), ("#d55e00", "--", "s"), ("#0072b2", "-.", "^"), ("#009e73", ":", "D")),
    *(("#cc79a7", (0, (5, 1)), "v"), ("#7f7f7f", (0, (3, 1, 1, 1)), "P"), ("#56b4e9", (0, (1, 1)), "X")),
    ("#b8860b", (0, (8, 2, 2, 2)), "*"),
]


@dataclass(frozen=True)
class Shown:
    """A row of the table that has a run."""

    label: str
    run: Run
    compares: bool = True

    @property
    def name(self) -> str:
        """The label, and what a reader of its curve must know."""
        if not self.run.completed:
            return f"{self.label} ({self.run.status})"
        return self.label if self.compares else f"{self.label} (does not compare)"


@dataclass(frozen=True)
class Plot:
    figure: Figure
    alt: str  # what is seen


def draw(table: Table, folder: Path) -> list[tuple[Path, str]]:
    """Write the plots for which the table has values to ``<folder>/<table>-<plot>.png``; each with what is seen."""
    images = []
    rows = [Shown(row.label, row.run, row.compares) for row in table.rows if row.run]
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


def legend_below(figure: Figure) -> None:
    figure.legend(loc="outside lower left", frameon=False, fontsize="small")


def value(row: Shown, metric: str) -> float | None:
    """The metric of a completed run, None without one; a loss that diverged cannot be drawn."""
    found = METRICS[metric].read(row.run).number if row.run.completed else None
    return found if found is not None and math.isfinite(found) else None


def loss_plot(rows: list[Shown]) -> Plot | None:
    """Training loss as logged (line) and evaluation loss (markers) over epochs."""
    curves = []
    for row, look in zip(rows, cycle(LOOKS), strict=False):
        tests = [(e.epoch, e.loss) for e in row.run.record.eval if e.loss is not None and math.isfinite(e.loss)]
        curves.append((row.name, look, training_losses(row.run), tests))
    drawn = sum(bool(steps) + bool(tests) for *_, steps, tests in curves)
    if not drawn:
        return None
    figure, (axis,) = new_figure(legend_lines=drawn)
    said = []
    for name, (colour, dashes, marker), steps, tests in curves:
        parts = []
        if steps:
            alone = "x" if len(steps) == 1 else ""  # a line of one point has no length
            axis.plot(
                *zip(*steps, strict=True), color=colour, linestyle=dashes, marker=alone, label=f"{name}, training"
            )
            ends = dict.fromkeys([shown(steps[0][1]), shown(steps[-1][1])])
            parts.append(f"training {' to '.join(ends)}")
        if tests:
            axis.plot(*zip(*tests, strict=True), color=colour, linestyle="none", marker=marker,
                      label=f"{name}, evaluation")  # fmt: skip
            parts.append(f"evaluation {' then '.join(shown(number) for _, number in tests)}")
        said += [f"{name}: {', '.join(parts)}"] if parts else []
    axis.set(xlabel="epoch", ylabel="loss (nats per token)")
    axis.set_xlim(left=0)
    legend_below(figure)
    return Plot(figure, f"Loss over epochs. {'; '.join(said)}.")


def training_losses(run: Run) -> list[tuple[float, float]]:
    """(epoch, loss) of the logged steps, evenly chosen where they are more than a plot can show."""
    path = log_of(run.folder, run.job_id)
    points: list[tuple[float, float]] = []
    every = 1
    try:
        logged = (e for e in (entries(path) if path else ()) if {"epoch", "loss"} <= e.keys())
        for number, entry in enumerate(logged):
            if number % every == 0 and abs(entry["loss"]) <= LARGEST_LOSS and 0 <= entry["epoch"] <= LARGEST_LOSS:
                points.append((entry["epoch"], entry["loss"]))
            if len(points) > 2 * POINTS:
                points, every = points[::2], every * 2
    except OSError:  # without its log, a run has its evaluations
        return []
    return points


def memory_plot(rows: list[Shown]) -> Plot | None:
    """GPU and CPU memory over time, the largest of all GPUs (nodes) at each sample, the peak of each run marked."""
    parts = [("GPU", 0, read_gpu_log), ("CPU", 1, read_cpu_log)]
    curves = {kind: [curve(row.run, which, read) for row in rows] for kind, which, read in parts}
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
                (handles[row.name],) = axis.plot(*top, color=colour, linestyle=dashes, marker=marker)
                peak_texts.setdefault(row.name, []).append(f"{kind} {top[1]:,.0f} MiB")
        axis.set(xlabel="time (s)", ylabel=f"{kind} memory used (MiB)")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    said = [f"{name}: {', '.join(texts)}" for name, texts in peak_texts.items()]
    figure.legend(list(handles.values()), said, title="peak (marked)", alignment="left", loc="outside lower left",
                  frameon=False, fontsize="small", title_fontsize="small")  # fmt: skip
    return Plot(figure, f"{' and '.join(kinds)} memory over time. Peaks of {'; '.join(said)}.")


def curve(run: Run, which: int, read: Callable[[Path], MemoryLog]) -> list[tuple[float, float]]:
    """(seconds, MiB) of the GPU or node with the highest peak; empty when its times cannot be read."""
    if which == 0 and run.gpu.reason:
        return []
    logs = [read(path) for path in logs_of(run.folder, run.job_id)[which]]
    series = [(log.peak(name), log, name) for log in logs for name in log.names()]
    if not series:
        return []
    _, log, name = max(series, key=lambda entry: entry[0])
    try:
        return log.curve(name)
    except ValueError:
        return []


def peaks(rows: list[Shown]) -> Plot | None:
    """Peak memory of GPU and CPU as bars; offloaded runs are hatched."""
    kinds = [(kind, metric) for kind, metric in (("GPU", "peak_gpu"), ("CPU", "peak_cpu"))
             if any(value(row, metric) for row in rows)]  # fmt: skip
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds))
    said = []
    for axis, (kind, metric) in zip(axes, kinds, strict=True):
        bars_of = {row.name: mib for row in reversed(rows) if (mib := value(row, metric)) is not None}
        hatches = ["////" if "offload" in label else "" for label in bars_of]
        bars = axis.barh(list(bars_of), list(bars_of.values()), color="#cccccc", edgecolor="black", hatch=hatches)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        axis.set(xlabel=f"peak {kind} memory (MiB)")
        axis.margins(x=0.18)
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
        said.append(f"{kind}: " + "; ".join(f"{name} {mib:,.0f} MiB" for name, mib in reversed(bars_of.items())))
    return Plot(figure, f"Peak memory as bars. {'. '.join(said)}.")


def throughput(rows: list[Shown]) -> Plot | None:
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
    predicted = by_gpus(rows, PREDICTED)
    if metric == STEADY and predicted:
        axis.plot(*zip(*predicted, strict=True), color="#d55e00", marker="s", linestyle=":", label="predicted")
    axis.set(xlabel=with_left_out("GPUs", rows, metric), ylabel=RATE_NAMES[metric], xticks=gpus)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    measured = over_gpus([(n, f"{shown(rate)} samples/s") for n, rate in points])
    ends = f"ideal {shown(ideal[-1])} on {gpus[-1]}"
    if metric == STEADY and predicted:
        ends += f"; predicted {over_gpus([(n, shown(rate)) for n, rate in predicted])}"
    return Plot(figure, f"Throughput ({RATE_NAMES[metric]}) over GPUs: {measured}; {ends}.{left_out_of(rows, metric)}")


def efficiency(rows: list[Shown]) -> Plot | None:
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
    axis.set(xlabel=with_left_out("GPUs", rows, metric), ylabel=f"efficiency against {first} (%)", xticks=gpus)
    axis.set_ylim(0, max(110, *percent) * 1.02)
    axis.legend(frameon=False)
    said = over_gpus([(n, f"{number:.0f} %") for n, number in zip(gpus, percent, strict=True)])
    return Plot(figure, f"Efficiency against {first}, ideal 100 %: {said}.{left_out_of(rows, metric)}")


def speed(rows: list[Shown]) -> Plot | None:
    """Speed over peak memory, of the GPU where there is one: what is up and to the left is better."""
    kind = "GPU" if any(value(row, "peak_gpu") for row in rows) else "CPU"
    metric = rate_of(rows)
    points = []
    looks = []  # those of the same rows in the other plots of the table
    for row, look in zip(rows, cycle(LOOKS), strict=False):
        memory_mib, rate = value(row, f"peak_{kind.lower()}"), value(row, metric)
        if row.compares and memory_mib and rate:
            points.append((row.label, memory_mib, rate))
            looks.append(look)
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure(legend_lines=len(points) + 1)
    for number, ((label, memory_mib, rate), (colour, _, marker)) in enumerate(zip(points, looks, strict=True), 1):
        axis.plot(memory_mib, rate, color=colour, marker=marker, linestyle="none", label=f"{number}  {label}")
        axis.annotate(str(number), (memory_mib, rate), xytext=(5, 4), textcoords="offset points", fontsize="small")
    best = pareto_front([(memory_mib, rate) for _, memory_mib, rate in points])
    most = max(memory_mib for _, memory_mib, _ in points)
    if len(best) > 1 or most > best[0][0]:  # else it has no length
        steps = [*best, (most, best[-1][1])]
        axis.step(*zip(*steps, strict=True), where="post", color="#777777", linestyle="--", linewidth=1,
                  label="Pareto front: nothing is faster in less memory", zorder=0)  # fmt: skip
    axis.set(xlabel=with_left_out(f"peak {kind} memory (MiB)", rows, metric), ylabel=RATE_NAMES[metric])
    axis.margins(x=0.1, y=0.1)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    legend_below(figure)
    said = "; ".join(f"{label} {shown(rate)} samples/s in {mib:,.0f} MiB" for label, mib, rate in points)
    front = ", ".join(label for label, mib, rate in points if (mib, rate) in best)
    return Plot(
        figure, f"Speed over peak {kind} memory: {said}. On the Pareto front: {front}.{left_out_of(rows, metric)}"
    )


def prediction(rows: list[Shown]) -> Plot | None:
    """Measured over predicted samples/s, with the line on which they are equal; one kind of marker for each size."""
    points = []
    for row in rows:
        ranks, predicted, measured = (value(row, metric) for metric in ("gpus", PREDICTED, STEADY))
        if ranks and predicted and measured:
            points.append((int(ranks), predicted, measured))
    if len(points) < 2:
        return None
    sizes = sorted({ranks for ranks, *_ in points})
    figure, (axis,) = new_figure(legend_lines=len(sizes) + 1)
    for ranks, (colour, _, marker) in zip(sizes, cycle(LOOKS), strict=False):
        own = [(predicted, measured) for size, predicted, measured in points if size == ranks]
        axis.plot(*zip(*own, strict=True), color=colour, marker=marker, linestyle="none",
                  label=f"{ranks} rank{'s' if ranks > 1 else ''}")  # fmt: skip
    rates = [rate for _, *both in points for rate in both]
    ends = [min(rates) / 1.2, max(rates) * 1.2]
    axis.plot(ends, ends, color="#777777", linestyle="--", linewidth=1, label="measured = predicted", zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="predicted samples/s", ylabel=RATE_NAMES[STEADY])
    legend_below(figure)
    ratios = sorted(measured / predicted for _, predicted, measured in points)
    least, middle, most = (f"{100 * ratio:.0f} %" for ratio in (ratios[0], statistics.median(ratios), ratios[-1]))
    said = f"{len(points)} runs; measured is {least} to {most} of predicted, median {middle}."
    return Plot(figure, f"Measured over predicted samples/s: {said}")


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (memory, speed) beside which no other is as fast in less memory, or faster in as much; by rising memory."""
    front: list[tuple[float, float]] = []
    for memory_mib, rate in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or rate > front[-1][1]:
            front.append((memory_mib, rate))
    return front


def rate_of(rows: list[Shown]) -> str:
    """The rate of the steps alone, where two runs or more have it; the Trainer's counts evaluation as training."""
    return STEADY if len([row for row in rows if row.compares and value(row, STEADY)]) > 1 else TRAINERS


def by_gpus(rows: list[Shown], metric: str) -> list[tuple[int, float]]:
    """(GPUs, value) of the completed runs that compare, by rising number of GPUs."""
    found = [(value(row, "gpus"), value(row, metric)) for row in rows if row.compares]
    return sorted((int(gpus), number) for gpus, number in found if gpus and number)


def over_gpus(points: list[tuple[int, str]]) -> str:
    """Such as "10.1 samples/s on 1 GPU, 18.9 samples/s on 2"."""
    (first, text), *rest = points
    return ", ".join([f"{text} on {first} GPU{'s' if first > 1 else ''}", *(f"{text} on {n}" for n, text in rest)])


def left_out_of(rows: list[Shown], metric: str = "") -> str:
    """Which completed runs a line or a scatter leaves out, empty when it leaves out none. metric: that it needs."""
    completed = [row for row in rows if row.run.completed]
    apart = [row.label for row in completed if not row.compares]
    without = [row.label for row in completed if row.compares and metric and not value(row, metric)]
    found = {"does not compare": apart, f"no {RATE_NAMES.get(metric, metric)}": without}
    return "".join(f" Left out, {why}: {', '.join(labels)}." for why, labels in found.items() if labels)


def with_left_out(label: str, rows: list[Shown], metric: str) -> str:
    return "\n".join(filter(None, [label, left_out_of(rows, metric).strip()]))


DRAWINGS = {
    "loss": loss_plot,
    "memory": memory_plot,
    "peaks": peaks,
    "throughput": throughput,
    "efficiency": efficiency,
    "speed": speed,
    "prediction": prediction,
}
