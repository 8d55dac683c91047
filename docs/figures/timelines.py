"""Figures that show what ranks do over time.

python docs/figures/timelines.py "title=profile/4711" ...      # copy new traces into profile.json

profile.svg shows real traces, and the figures of pipelines show real runs (measure_pipeline.py). The others are
drawings.
"""

import gzip
import json
import pathlib
import sys
from functools import partial
from string import ascii_lowercase

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))

from style import PHASES, figure_with_legend

HERE = pathlib.Path(__file__).resolve().parent
PROFILE, PIPELINE = HERE / "profile.json", HERE / "pipeline.json"
Span = tuple[float, float]  # begin and length


def draw_spans(axes: Axes, row: float, phase: str, spans: list[Span], height: float = 0.7, **style: object) -> None:
    """Draw the spans of a phase as one path, which makes the file smaller."""
    low, high = row - height / 2, row + height / 2
    bars = [
        Path([(begin, low), (begin, high), (begin + length, high), (begin + length, low), (begin, low)], closed=True)
        for begin, length in spans
    ]
    if bars:
        axes.add_patch(PathPatch(Path.make_compound_path(*bars), **PHASES[phase] | style))


def name_rows(axes: Axes, names: list[str]) -> None:
    """Name the rows from top to bottom."""
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)


def phases(*names: str) -> dict[str, dict]:
    return {name: PHASES[name] for name in names}


def ddp() -> Figure:
    """Draw a rank that sends its buckets during the last micro batch's backward pass."""
    forward, backward, bucket = 3, 6, 1.5
    titles = ["accumulation 1", "accumulation 2: the first micro batch sends nothing (no_sync)"]
    legend = phases("forward", "backward", "optimizer step") | {"all-reduce of a bucket": PHASES["communication"]}
    figure, panels = figure_with_legend(2.6, legend, nrows=2, sharex=True)
    for axes, title, micro_batches in zip(panels, titles, (1, 2), strict=True):
        begins = [number * (forward + backward) for number in range(micro_batches)]
        last = begins[-1] + forward
        draw_spans(axes, 0, "forward", [(begin, forward) for begin in begins])
        draw_spans(axes, 0, "backward", [(begin + forward, backward) for begin in begins])
        # A bucket is full after each quarter of the backward pass
        sent = [(last + quarter * backward / 4, bucket) for quarter in (1, 2, 3, 4)]
        draw_spans(axes, 1, "communication", sent)
        for number, (begin, length) in enumerate(sent, start=1):
            axes.text(begin + length / 2, 1, str(number), ha="center", va="center", color="white")
        draw_spans(axes, 0, "optimizer step", [(last + backward + bucket, 1)])
        axes.set_title(title, loc="left")
        name_rows(axes, ["computes", "sends"])
        axes.set(xlim=(0, 21), xticks=[])
    panels[1].set_xlabel("time (a drawing, not a measurement)", loc="left")
    return figure


def multi_gpu() -> Figure:
    """Draw one optimizer step on 2 and 4 GPUs, with the same work per GPU.

    With 4 GPUs the all-reduce takes longer, and one rank is late.
    """
    runs = {2: ([10, 10], 1.5), 4: ([10, 10, 12, 10], 2.2)}  # GPUs -> computation of each rank, all-reduce
    legend = phases("forward", "backward", "wait") | {"all-reduce": PHASES["communication"]}
    figure, panels = figure_with_legend(2.1, legend, ncols=2, sharex=True)
    for axes, (gpus, (computation, sends)) in zip(panels, runs.items(), strict=True):
        last = max(computation)
        for rank, length in enumerate(computation):
            draw_spans(axes, rank, "forward", [(0, length / 3)])
            draw_spans(axes, rank, "backward", [(length / 3, length * 2 / 3)])
            draw_spans(axes, rank, "wait", [(length, last - length)])
            draw_spans(axes, rank, "communication", [(last, sends)])
        name_rows(axes, [f"rank {rank}" if rank < gpus else "" for rank in range(4)])
        axes.set_title(f"{gpus} GPUs: a step ends at {last + sends:g}", loc="left")
        axes.set(xlim=(0, 15))
    panels[0].set_xlabel("time, in tenths of the computation (a drawing, not a measurement)", loc="left")
    return figure


# Measured timelines

# A trace's name of a phase -> its name in PHASES. Reading data takes 2 ms here, which is too short to be seen
PROFILED = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}


def take_traces(arguments: list[str]) -> None:
    """Write one step of each rank's trace to profile.json: its phases and collectives."""
    kept = {}
    for argument in arguments:
        title, _, folder = argument.partition("=")
        kept[title] = {
            path.name.split(".")[0]: one_step(path) for path in sorted(pathlib.Path(folder).glob("rank_*.json.gz"))
        }
    PROFILE.write_text(json.dumps(kept) + "\n")


def one_step(trace: pathlib.Path) -> dict[str, list[Span]]:
    """Return the start and length of each span in the second profiled step, in milliseconds from the step's start."""
    events = [
        event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if event.get("ph") == "X"
    ]
    step = sorted(event["ts"] for event in events if event["name"] == "profiled step")[1]
    length = next(event["dur"] for event in events if event["name"] == "profiled step" and event["ts"] == step)
    found: dict[str, list[Span]] = {name: [] for name in (*PROFILED, "communication")}
    for event in events:
        name = "communication" if event["name"].startswith(("gloo:", "nccl")) else event["name"]
        if name in found and step <= event["ts"] < step + length:
            found[name].append((round((event["ts"] - step) / 1000, 2), round(event["dur"] / 1000, 2)))
    return found


def joined(spans: list[Span], gap: float) -> list[Span]:
    """Join spans with gaps that are too short to be seen. This makes the file smaller."""
    ends: dict[float, float] = {}  # begin of a joined span -> its end
    for begin, length in sorted(map(tuple, spans)):
        last = next(reversed(ends), None)
        if last is not None and begin - ends[last] < gap:
            ends[last] = max(ends[last], begin + length)
        else:
            ends[begin] = begin + length
    return [(begin, round(end - begin, 2)) for begin, end in ends.items()]


def profile() -> Figure:
    traces = json.loads(PROFILE.read_text())
    heights = [len(ranks) for ranks in traces.values()]
    legend = phases(*PROFILED.values(), "communication")
    figure, panels = figure_with_legend(1.3 + 0.5 * sum(heights), legend, nrows=len(traces), height_ratios=heights,
                                         sharex=True)  # fmt: skip
    for axes, (title, ranks) in zip(panels, traces.items(), strict=True):
        for rank, spans in enumerate(ranks.values()):
            for name, phase in PROFILED.items():
                draw_spans(axes, rank - 0.12, phase, spans[name], 0.42)
            draw_spans(axes, rank + 0.25, "communication", joined(spans["communication"], 2), 0.24, linewidth=0)
        name_rows(axes, [name.replace("_", " ") for name in ranks])
        axes.set_title(title, loc="left")
    panels[-1].set(xlabel="milliseconds", xlim=(0, 2650))
    return figure


def pipeline(schedule: str, title: str) -> Figure:
    """Draw when each rank of a measured run computed. Letters are micro batches."""
    ranks = json.loads(PIPELINE.read_text())[schedule]
    figure, axes = figure_with_legend(1.9, phases("forward", "backward"))
    for rank, spans in enumerate(ranks):
        for phase, micro, begin, end in spans:
            draw_spans(axes, rank, phase, [(begin, end - begin)])
            ink = "black" if phase == "forward" else "white"
            axes.text((begin + end) / 2, rank, ascii_lowercase[micro], ha="center", va="center", color=ink)
    name_rows(axes, [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_title(title, loc="left")
    axes.set(xlabel="seconds; letters are micro batches", xlim=(0, 1.75))
    return figure


FIGURES = {
    "ddp": ddp,
    "multi-gpu": multi_gpu,
    "profile": profile,
    "pipeline-gpipe": partial(
        pipeline, "gpipe", "GPipe: all forward passes, then all backward passes. Empty space is the bubble."
    ),
    "pipeline-1f1b": partial(
        pipeline, "1f1b", "1F1B: each backward pass as early as possible. Empty space is the bubble."
    ),
}

if __name__ == "__main__" and sys.argv[1:]:
    take_traces(sys.argv[1:])
