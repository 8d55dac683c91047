"""The plots of a table, as PNG. Lines and bars are told apart by dashes, markers and hatches, not by colour alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reporting.memory_logs import POINTS, MemoryLog, logs_of, read_cpu_log, read_gpu_log
from reporting.metrics import METRICS
from reporting.record import LARGEST_LOSS
from reporting.runs import Run
from reporting.tables import Table
from reporting.trainer_log import entries, log_of

DPI = 110
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


def draw(table: Table, folder: Path) -> list[Path]:
    """Write the plots for which the table has values to ``<folder>/<table>-<plot>.png``."""
    images = []
    for name in table.plots:
        figure = DRAWINGS[name]([Shown(row.label, row.run) for row in table.rows if row.run])
        if figure:
            images.append(folder / f"{table.name}-{name}.png")
            figure.savefig(images[-1], dpi=DPI)
    return images


def new_figure(columns: int = 1, width: float = 7.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def value(row: Shown, metric: str) -> float | None:
    """The metric of a completed run, None without one; a loss that diverged cannot be drawn."""
    found = METRICS[metric].read(row.run).number if row.run.completed else None
    return found if found is not None and math.isfinite(found) else None


def loss(rows: list[Shown]) -> Figure | None:
    """Training loss as logged (line) and evaluation loss (markers) over epochs."""
    figure, (axis,) = new_figure()
    drawn = False
    for row, (colour, dashes, marker) in zip(rows, LOOKS, strict=False):
        steps = training_losses(row.run)
        tests = [(e.epoch, e.loss) for e in row.run.record.eval if e.loss is not None and math.isfinite(e.loss)]
        for points, look, name in (
            (steps, {"linestyle": dashes}, "training"),
            (tests, {"marker": marker}, "evaluation"),
        ):
            if points:
                style = {"linestyle": "none"} | look
                axis.plot(*zip(*points, strict=True), color=colour, label=f"{row.label}, {name}", **style)
                drawn = True
    axis.set(xlabel="epoch", ylabel="loss (nats per token)")
    axis.set_xlim(left=0)
    if drawn:
        axis.legend(frameon=False, fontsize="small")
    return figure if drawn else None


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


def memory(rows: list[Shown]) -> Figure | None:
    """GPU and CPU memory over time, the largest of all GPUs (nodes) at each sample, the peak of each run marked."""
    parts = [("GPU", 0, read_gpu_log), ("CPU", 1, read_cpu_log)]
    curves = {kind: [curve(row.run, which, read) for row in rows] for kind, which, read in parts}
    kinds = [kind for kind in curves if any(curves[kind])]
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds), 9.5 if len(kinds) > 1 else 7.0)
    for axis, kind in zip(axes, kinds, strict=True):
        for row, points, (colour, dashes, marker) in zip(rows, curves[kind], LOOKS, strict=False):
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.2)
                top = max(points, key=lambda point: point[1])
                axis.plot(*top, color=colour, linestyle=dashes, marker=marker, label=f"{row.label}: {top[1]:,.0f} MiB")
        axis.set(xlabel="time (s)", ylabel=f"{kind} memory used (MiB)")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.legend(frameon=False, fontsize="x-small", title="peak", title_fontsize="small")
    return figure


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


def peaks(rows: list[Shown]) -> Figure | None:
    """Peak memory of GPU and CPU as bars; offloaded runs are hatched."""
    kinds = [(kind, metric) for kind, metric in (("GPU", "peak_gpu"), ("CPU", "peak_cpu"))
             if any(value(row, metric) for row in rows)]  # fmt: skip
    if not kinds:
        return None
    figure, axes = new_figure(len(kinds), 9.5 if len(kinds) > 1 else 7.0)
    for axis, (kind, metric) in zip(axes, kinds, strict=True):
        shown = {row.label: mib for row in reversed(rows) if (mib := value(row, metric)) is not None}
        hatches = ["////" if "offload" in label else "" for label in shown]
        bars = axis.barh(list(shown), list(shown.values()), color="#cccccc", edgecolor="black", hatch=hatches)
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        axis.set(xlabel=f"peak {kind} memory (MiB)")
        axis.margins(x=0.15)
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
    return figure


def throughput(rows: list[Shown]) -> Figure | None:
    """Samples per second over GPUs, with the line of the first run's rate per GPU."""
    points = by_gpus(rows, "samples_per_second")
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure()
    gpus, rates = zip(*points, strict=True)
    axis.plot(gpus, [rates[0] / gpus[0] * n for n in gpus], color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, rates, color="black", marker="o", label="measured")
    axis.set(xlabel="GPUs", ylabel="train samples/s", xticks=gpus)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure


def efficiency(rows: list[Shown]) -> Figure | None:
    """Efficiency against the run with the fewest GPUs: throughput per GPU, or runtime where the model grows too."""
    layers = {value(row, "num_layers") for row in rows}
    by_time = len(layers - {None}) > 1
    points = by_gpus(rows, "runtime" if by_time else "samples_per_second")
    if len(points) < 2:
        return None
    gpus, values = zip(*points, strict=True)
    percent = [values[0] / v * 100 if by_time else v / n / (values[0] / gpus[0]) * 100 for n, v in points]
    figure, (axis,) = new_figure()
    axis.axhline(100, color="#777777", linestyle="--", label="ideal")
    axis.plot(gpus, percent, color="black", marker="o", label="runtime" if by_time else "throughput per GPU")
    axis.set(xlabel="GPUs", ylabel=f"efficiency against {gpus[0]} GPU{'s' if gpus[0] > 1 else ''} (%)", xticks=gpus)
    axis.set_ylim(0, max(110, *percent) * 1.02)
    axis.legend(frameon=False)
    return figure


def speed(rows: list[Shown]) -> Figure | None:
    """Speed over peak memory, of the GPU where there is one: what is up and to the left is better."""
    kind = "GPU" if any(value(row, "peak_gpu") for row in rows) else "CPU"
    points = []
    for row in rows:
        memory_mib, rate = value(row, f"peak_{kind.lower()}"), value(row, "steady_samples_per_second")
        if memory_mib and rate:
            points.append((row.label, memory_mib, rate))
    if len(points) < 2:
        return None
    figure, (axis,) = new_figure()
    for number, (label, memory_mib, rate) in enumerate(points, 1):
        colour, _, marker = LOOKS[(number - 1) % len(LOOKS)]
        axis.plot(memory_mib, rate, color=colour, marker=marker, linestyle="none", label=f"{number}  {label}")
        axis.annotate(str(number), (memory_mib, rate), xytext=(5, 4), textcoords="offset points", fontsize="small")
    axis.set(xlabel=f"peak {kind} memory (MiB)", ylabel="train samples/s, steps alone")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.margins(x=0.1, y=0.1)
    axis.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def by_gpus(rows: list[Shown], metric: str) -> list[tuple[int, float]]:
    """(GPUs, value) of the completed runs, by rising number of GPUs."""
    found = [(value(row, "gpus"), value(row, metric)) for row in rows]
    return sorted((int(gpus), number) for gpus, number in found if gpus and number)


DRAWINGS = {
    "loss": loss,
    "memory": memory,
    "peaks": peaks,
    "throughput": throughput,
    "efficiency": efficiency,
    "speed": speed,
}
