"""Diagrams of boxes and arrows. Coordinates are inches."""

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from palette import EMPTY, PHASES, RANKS
from style import INK, RED, WIDTH, Point, Sides, arrow, box, canvas, sides

MARGIN = 0.1
FAINT = (INK, 0.7)
SENDS = PHASES["communication"]["color"]
COLLECTIVE = {"facecolor": SENDS, "edgecolor": SENDS, "ink": "white"}
STOP = {"facecolor": "none", "edgecolor": RED}
PLAIN = {"facecolor": "none", "edgecolor": "#8c8c8c"}
SAME = {"facecolor": ("#8c8c8c", 0.2), "edgecolor": "#8c8c8c"}  # all ranks have the same numbers


def columns(widths: list[float]) -> list[float]:
    """Return the left edges of columns with equal gaps, which fill the width of the figure."""
    gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(widths) - 1)
    return [MARGIN + sum(widths[:number]) + gap * number for number in range(len(widths))]


def bent_arrow(axes: Axes, start: Point, end: Point) -> None:
    """Draw an arrow that goes right, then up or down, then right."""
    middle = (start[0] + end[0]) / 2
    arrow(axes, start, (middle, start[1]), (middle, end[1]), end)


def chain(axes: Axes, boxes: list[Sides]) -> None:
    """Draw an arrow from each box to the next."""
    for before, after in pairwise(boxes):
        arrow(axes, before.right, after.left)


def environment() -> Figure:
    figure, axes = canvas(2.3)
    widths = [1.2, 1.1, 1.3, 2.35]
    submitted, script, program, file = columns(widths)
    for x, text in zip(
        columns(widths), ["you submit", "starts programs", "run at the same time", "files"], strict=True
    ):
        axes.text(x, 2.05, text, va="bottom", color=FAINT)
    first = box(axes, submitted, 0.77, widths[0], 0.56, "sbatch\nbaseline.slurm")
    second = box(axes, script, 0.77, widths[1], 0.56, "job.sh")
    arrow(axes, first.right, second.left)
    programs = {
        "nvidia-smi": (1.5, PLAIN, {1.7: "gpu_memory/gpu_memory_log_4711.csv"}),
        "train.py\non each rank": (
            0.77, {}, {1.27: "log/baseline_4711.out", 1.05: "results/4711.json", 0.83: "output/4711/"},
        ),
        "psrecord": (0.2, PLAIN, {0.4: "cpu_memory/cpu_memory_log_4711.txt"}),
    }  # fmt: skip
    for text, (y, look, files) in programs.items():
        third = box(axes, program, y, widths[2], 0.56 if "\n" in text else 0.4, text, **look)
        bent_arrow(axes, second.right, third.left)
        for height, name in files.items():
            bent_arrow(axes, third.right, (file - 0.05, height))
            axes.text(file, height, name, va="center", family="monospace")
    return figure


def deepspeed_config() -> Figure:
    figure, axes = canvas(2.35)
    widths = [1.45, 1.45, 1.0, 1.25]
    given, read, used, checked = columns(widths)
    flags = box(axes, given, 1.6, widths[0], 0.6, "--learning_rate 1e-4\nBATCH_SIZE=8")
    file = box(axes, given, 0.7, widths[0], 0.6, 'zero2.json\n"lr": "auto"\n"stage": 2')
    arguments = box(axes, read, 1.6, widths[1], 0.6, "TrainingArguments")
    valid = box(axes, read, 0.7, widths[1], 0.6, "all keys known?\nno contradictions?")
    engine = box(axes, used, 1.15, widths[2], 0.6, 'engine\nwithout "auto"')
    table = box(axes, checked, 1.15, widths[3], 0.6, "table of knobs:\nused = asked for?")
    refused = box(axes, read, MARGIN, widths[1], 0.28, "exit code 2", **STOP)
    ended = box(axes, checked, MARGIN, widths[3], 0.28, "exit code 3", **STOP)
    arrow(axes, flags.right, arguments.left)
    arrow(axes, file.right, valid.left)
    bent_arrow(axes, arguments.right, engine.left)
    bent_arrow(axes, valid.right, engine.left)
    arrow(axes, engine.right, table.left)
    for start, end in ((valid, refused), (table, ended)):
        arrow(axes, start.bottom, end.top)
        axes.text(start.bottom[0] + 0.06, (start.bottom[1] + end.top[1]) / 2, "no", va="center")
    axes.text(arguments.right[0] + 0.06, 1.97, 'fills each "auto"', va="bottom")
    axes.text(valid.right[0] + 0.06, 0.93, "yes", va="top")
    return figure


def by_hand() -> Figure:
    """Draw two rows of steps. The number of a gap is above its step."""
    figure, axes = canvas(2.7)
    same = {"own rows\nof the batch": "gap 2", "forward,\nbackward": "", "all-reduce:\nmean of the\ngradients": "gap 4"}
    rows = {
        "Data parallelism": (1.5, same | {"Adam:\nall parameters": ""}),
        "ZeRO-1": (MARGIN, same | {"Adam:\nown part only": "gaps 5, 6", "all-gather\nof the parts": "gap 6"}),
    }
    for name, (y, steps) in rows.items():
        axes.text(MARGIN, y + 0.95, name, weight="bold")
        boxes = [
            box(axes, x, y, 1.15, 0.6, text, **(COLLECTIVE if text.startswith("all-") else {}))
            for x, text in zip(columns([1.15] * 5), steps, strict=False)
        ]
        chain(axes, boxes)
        for step, gap in zip(boxes, steps.values(), strict=True):
            axes.text(step.top[0], step.top[1] + 0.05, gap, ha="center", va="bottom", color=FAINT)
    return figure


def hang_clinic() -> Figure:
    figure, axes = canvas(1.7)
    causes = {
        "1. queue\nsqueue": "it waits for\nresources",
        "2. log\na silent rank?": "error of the\nfirst rank",
        "3. process\nps, top": "killed (137),\nor gone",
        "4. stack\npy-spy dump": "another\ncollective",
        "5. network\nNCCL_DEBUG": "wrong interface,\nport or firewall",
    }
    lefts = columns([1.2] * 5)
    places = [box(axes, x, 1.1, 1.2, 0.5, place) for x, place in zip(lefts, causes, strict=True)]
    found = [box(axes, x, MARGIN, 1.2, 0.5, cause, **PLAIN) for x, cause in zip(lefts, causes.values(), strict=True)]
    chain(axes, places)
    for place, cause in zip(places, found, strict=True):
        arrow(axes, place.bottom, cause.top)
    axes.text(places[0].bottom[0] + 0.06, 0.85, "you find", va="center", color=FAINT)
    return figure


def multi_node() -> Figure:
    """Draw the launch on two nodes. The numbers are those of the list on the page."""
    figure, axes = canvas(2.85)
    left = 1.85
    for name, y, height in (("node1", 1.2, 1.55), ("node2", MARGIN, 0.9)):
        frame = {"facecolor": ("#8c8c8c", 0.08), "edgecolor": "#8c8c8c"}
        axes.add_patch(Rectangle((left, y), WIDTH - MARGIN - left, height, **frame))
        axes.text(left + 0.1, y + height - 0.08, name, va="top", weight="bold")
    srun = box(axes, MARGIN, 1.125, 1.3, 0.5, "srun\none task per node")
    meeting = box(axes, 4.0, 1.32, 1.3, 0.5, "rendezvous server\n10.0.0.1:29871")
    started = []
    for y in (2.05, 0.2):
        launcher = box(axes, 2.6, y, 0.9, 0.5, "torchrun")
        ranks = box(axes, 5.7, y, 1.35, 0.5, "ranks\nRANK, LOCAL_RANK")
        bend = 1.6
        arrow(axes, srun.right, (bend, srun.right[1]), (bend, launcher.left[1]), launcher.left)
        arrow(axes, launcher.right, ranks.left)
        above = launcher.right[1] + 0.04
        axes.text(left + 0.1, above, "2 starts", va="bottom")
        axes.text(4.65, above, "4 starts its ranks", ha="center", va="bottom")
        facing = launcher.bottom if y > 1 else launcher.top
        arrow(axes, facing, (facing[0], meeting.left[1]), meeting.left)
        started.append(ranks)
    axes.text(3.15, meeting.left[1] + 0.04, "3 both join", va="bottom")
    arrow(axes, started[0].bottom, started[1].top, arrowstyle="<|-|>", linewidth=1.6, color=SENDS)
    axes.text(started[0].bottom[0] + 0.1, meeting.left[1], "5 NCCL", va="center")
    return figure


def tensor_parallel() -> Figure:
    """Draw a feed-forward half on two ranks: one matrix cut by columns, one cut by rows, and an all-reduce."""
    figure, axes = canvas(2.95)
    _, given, first, between, second, part, everyone, result = columns([0.4, 0.6, 1.0, 0.85, 0.5, 0.4, 0.3, 0.75])
    axes.text(first + 0.5, 2.5, "cut by columns\n(outputs)", ha="center", va="bottom")
    axes.text(second + 0.25, 2.5, "cut by rows\n(inputs)", ha="center", va="bottom")
    box(axes, everyone, 0.15, 0.3, 2.3, "", **COLLECTIVE)
    axes.text(everyone + 0.15, 1.3, "all-reduce", ha="center", va="center", rotation=90, color="white")
    for rank, middle in enumerate((1.95, 0.65)):
        own = {"facecolor": RANKS[rank], "edgecolor": INK, "ink": "black"}
        name = "₀₁"[rank]
        low = middle - 0.25
        axes.text(MARGIN, middle, f"rank {rank}", va="center")
        draw_halves(axes, [(first, low), (first + 0.5, low)], rank, f"A{name}")
        draw_halves(axes, [(second, middle), (second, middle - 0.5)], rank, f"B{name}")
        chain(axes, [
            box(axes, given, low, 0.6, 0.5, "X\nwhole", **SAME),
            sides(first, low, 1.0, 0.5),
            box(axes, between, low, 0.85, 0.5, f"GELU(X A{name})", **own),
            sides(second, low, 0.5, 0.5),
            box(axes, part, low, 0.4, 0.5, f"Z{name}", **own),
            sides(everyone, low, 0.3, 0.5),
            box(axes, result, low, 0.75, 0.5, "Z₀ + Z₁\nwhole", **SAME),
        ])  # fmt: skip
    return figure


def draw_halves(axes: Axes, corners: list[Point], own: int, name: str) -> None:
    """Draw the two halves of a matrix, of which the rank holds one."""
    axes.add_patch(Rectangle(corners[1 - own], 0.5, 0.5, **EMPTY))
    x, y = corners[own]
    axes.add_patch(Rectangle((x, y), 0.5, 0.5, facecolor=RANKS[own], edgecolor=INK))
    axes.text(x + 0.25, y + 0.25, name, ha="center", va="center", color="black")


FIGURES = {
    "environment": environment,
    "deepspeed-config": deepspeed_config,
    "by-hand": by_hand,
    "hang-clinic": hang_clinic,
    "multi-node": multi_node,
    "tensor-parallel": tensor_parallel,
}
