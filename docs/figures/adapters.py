"""Compute the tables of bloom-7b1 in docs/lora.md, and draw its figure: what a rank holds with and without LoRA.

The bytes follow from formulas for parameters, gradients, optimizer state and DDP's buckets. Activations are left out.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from estimate.command_line import parse_memory_plan
from estimate.model_shape import Shape, trace_shape
from memory_bars import Bar, Groups, draw_groups
from palette import EMPTY
from shared.units import GIB
from style import INK, PARTS, WIDTH

GPUS = 4
RANK = 8  # of the adapters
ACCUMULATION = 4
# Bytes per trained parameter in 16-bit training: whole on each rank, and divided over the ranks
TRAINED = {
    "DDP": ({"parameters": 4, "gradients": 4, "optimizer state": 8, "buffers": 4}, {}),
    "ZeRO-1": ({"parameters": 2, "gradients": 2}, {"optimizer state": 12}),
    "ZeRO-2": ({"parameters": 2}, {"gradients": 2, "optimizer state": 12}),
    "ZeRO-3": ({}, {"parameters": 2, "gradients": 2, "optimizer state": 12}),
    "FSDP": ({}, {"parameters": 4, "gradients": 4, "optimizer state": 8}),
}
LAYER = 3.68  # inches of the figure for the matrices of a layer
FROZEN = 2  # bytes of a frozen parameter, in the precision of the computation


def trained_bytes(method: str, gpus: int = GPUS) -> Bar:
    """Return the bytes of each part that a rank holds per trained parameter."""
    whole, divided = TRAINED[method]
    sizes = whole | {part: size / gpus for part, size in divided.items()}
    return {part: sizes[part] for part in PARTS if part in sizes}


def frozen_bytes(method: str, gpus: int = GPUS) -> float:
    """Return the bytes that a rank holds per frozen parameter. Only ZeRO-3 and FSDP divide parameters."""
    return FROZEN / gpus if "parameters" in TRAINED[method][1] else FROZEN


def held(method: str, frozen: int, trained: int, gpus: int = GPUS) -> Bar:
    """Return the GiB of each part on a rank."""
    sizes = {part: size * trained / GIB for part, size in trained_bytes(method, gpus).items()}
    sizes["parameters"] += frozen_bytes(method, gpus) * frozen / GIB
    return sizes


def bloom_7b1() -> Shape:
    return trace_shape(parse_memory_plan(["--model_name", "bigscience/bloom-7b1"], environment={}))


def adapter_elements(hidden: int, blocks: int, rank: int = RANK) -> int:
    """Return the elements of the adapters of a BLOOM.

    A block has four linear layers: hidden to 3 x hidden (query, key, value), hidden to hidden, hidden to 4 x hidden,
    and 4 x hidden to hidden. Each has rank x (inputs + outputs) elements.
    """
    return blocks * rank * hidden * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))


def held_table(rank: int = RANK) -> str:
    """Return the table "full against LoRA", in GiB."""
    shape = bloom_7b1()
    adapters = adapter_elements(shape.hidden, shape.layers, rank)
    lines = ["| | Full | LoRA: frozen | LoRA: trained | LoRA |", "|" + " --- |" * 5]
    for method in TRAINED:
        full = sum(held(method, 0, shape.parameters).values())
        frozen = frozen_bytes(method) * shape.parameters / GIB
        trained = sum(trained_bytes(method).values()) * adapters / GIB
        lines.append(f"| {method} | {full:.2f} | {frozen:.2f} | {trained:.2f} | **{frozen + trained:.2f}** |")
    return "\n".join(lines)


def sent_with_lora() -> dict[str, float]:
    """Return the bytes that a rank sends in a step with LoRA in 16 bit, in a ring of GPUS ranks.

    ZeRO-3 gathers each weight in both passes of each micro batch. FULL_SHARD gathers the embedding only once, and
    reduces gradients once in a step.
    """
    shape = bloom_7b1()
    psi, t = shape.parameters, adapter_elements(shape.hidden, shape.layers)
    sizes = {
        "DDP": 2 * 4 * t,
        "ZeRO-1": 2 * (2 + 1) * t,
        "ZeRO-2": 2 * (2 * ACCUMULATION + 1) * t,
        "ZeRO-3": 2 * ACCUMULATION * (2 * (psi + t) + t),
        "FSDP FULL_SHARD": 2 * (ACCUMULATION * (psi + sum(shape.block_sizes) + 2 * t) + t),
    }
    return {method: (GPUS - 1) / GPUS * size for method, size in sizes.items()}


def draw_matrices(axes: Axes) -> None:
    """Draw the matrices of a layer, and the numbers that training needs for each. Coordinates are inches."""
    columns = {"parameters": 0.0, "gradients": 1.25, "optimizer state": 2.5}
    side, thin = 0.75, 0.15
    frozen, trained = 1.12, 0.12  # lower edges of the two rows
    axes.text(0, 2.55, "y  =  W x  +  2 B A x", va="center")
    for part, x in columns.items():
        axes.text(x, 2.1, part, va="center", weight="bold")
        for copy in range(2 if part == "optimizer state" else 1):  # two moments
            right, down = x + 0.08 * copy, -0.08 * copy
            look = PARTS[part] if part == "parameters" else EMPTY
            axes.add_patch(Rectangle((right, frozen + down), side, side, **look))
            axes.add_patch(Rectangle((right, trained + down), thin, side, **PARTS[part]))
            axes.add_patch(Rectangle((right + 0.25, trained + side - thin + down), side, thin, **PARTS[part]))
    for x, text, ink in ((0.375, "W\nfrozen", "white"), (1.625, "none", INK), (2.95, "none", INK)):
        axes.text(x, frozen + side / 2, text, ha="center", va="center", color=ink)
    axes.text(0.075, trained + side / 2, "B", ha="center", va="center", color="white")
    axes.text(0.25 + side / 2, trained + side - thin / 2, "A", ha="center", va="center_baseline", color="white")
    axes.text(0.25, trained + 0.25, "trained", va="center")
    axes.set(xlim=(-0.02, LAYER - 0.02), ylim=(0, 2.65))
    axes.axis("off")


def adapters() -> Figure:
    shape = bloom_7b1()
    base, trained = shape.parameters, adapter_elements(shape.hidden, shape.layers)
    groups: Groups = {
        method: {"full": held(method, 0, base), "LoRA": held(method, base, trained)} for method in TRAINED
    }
    figure = plt.figure(figsize=(WIDTH, 3.1))
    draw_matrices(figure.add_axes((0.01, 0.04, LAYER / WIDTH, 2.65 / 3.1)))
    axes = figure.add_axes((0.58, 0.13, 0.41, 0.78))
    draw_groups(axes, groups, PARTS, "{:.2f}")
    axes.set(xlabel=f"GiB per GPU, bloom-7b1 on {GPUS} GPUs, computed", xlim=(0, 158))
    handles = [Patch(label=part, **PARTS[part]) for part in ("parameters", "gradients", "optimizer state", "buffers")]
    figure.legend(handles=handles, loc="upper right", ncols=4, frameon=False, handlelength=1.5, columnspacing=1.2)
    return figure


FIGURES = {"lora": adapters}
