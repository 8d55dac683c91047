"""Draw when each unit of FSDP is whole on a rank."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from reporting.colours import PARTS
from style import WIDTH

UNITS = ["embedding, head", *(f"block {number}" for number in range(1, 6))]
END = 12  # the forward pass takes 6 units of time, and so does the backward pass


def fsdp() -> Figure:
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 2.1), sharey=True, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06)
    strategies = {"FULL_SHARD": full_shard, "SHARD_GRAD_OP": shard_grad_op, "the whole model is one unit": one_unit}
    for axes, (title, times) in zip(panels, strategies.items(), strict=True):
        for number in range(len(UNITS)):
            axes.broken_barh([(0, END)] if number == 0 else times(number), (-number - 0.4, 0.8), **PARTS["parameters"])
        axes.axvline(END / 2, color="#8c8c8c", linewidth=0.8, linestyle="--", zorder=0)
        axes.set(title=title, xlim=(0, END), xticks=[3, 9], xticklabels=["forward", "backward"])
        axes.set(yticks=[-number for number in range(len(UNITS))], yticklabels=UNITS)
        axes.tick_params(length=0)
    return figure


# These functions return the begin and the length of the times in which a block is whole


def full_shard(block: int) -> list[tuple[int, int]]:
    """A block takes one unit of time to be gathered before it is used, and one to compute."""
    return [(block - 1, 2), (END - 2 - block, 2)]


def shard_grad_op(block: int) -> list[tuple[int, int]]:
    return [(block - 1, END + 1 - 2 * block)]


def one_unit(_: int) -> list[tuple[int, int]]:
    return [(0, END)]


FIGURES = {"fsdp": fsdp}
