"""The figure of docs/cost.md: power and utilisation of a GPU in four situations. It is a drawing, not a measurement."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from style import INK, WIDTH

POWER = {"color": INK, "linewidth": 1.4, "label": "power, % of the limit"}
UTILISATION = {"color": "#d6604d", "linewidth": 1, "linestyle": (0, (3, 2)), "label": "utilisation, %"}
COMPUTING, EVALUATING, WAITING, OFFLOAD, IDLE = 90, 65, 33, 48, 18  # power in % of the limit
END = 20  # end of the time axis, which has no unit

Phase = tuple[float, float, float]  # length, power, utilisation


def draw_curve(axes: Axes, title: str, phases: list[Phase]) -> None:
    """Draw the phases one after the other. Power and utilisation are constant in a phase."""
    time, times, power, utilisation = 0.0, [], [], []
    for length, watts, share in phases:
        times += [time, time + length]
        power += [watts, watts]
        utilisation += [share, share]
        time += length
    axes.plot(times, utilisation, **UTILISATION)
    axes.plot(times, power, **POWER)
    axes.axhline(100, color="#8c8c8c", linewidth=0.6, linestyle=":")
    axes.set_title(title, loc="left")
    axes.set(xlim=(0, END), ylim=(0, 112), xticks=[], yticks=[0, 50, 100])


def power_curves() -> Figure:
    figure, panels = plt.subplots(1, 4, figsize=(WIDTH, 2.15), sharey=True, layout="constrained")
    pauses = [(1.6, EVALUATING, 90), (1.0, IDLE, 0)]
    steps = (7.4, COMPUTING, 98)
    healthy, starving, hang, offload = panels
    draw_curve(healthy, "healthy", [steps, *pauses, steps, *pauses])
    healthy.annotate("evaluation", (7.4, EVALUATING), (0.7, 51), va="center")
    healthy.annotate("checkpoint", (9, IDLE), (0.7, 24), va="center")
    draw_curve(starving, "slow data loader", [(2, COMPUTING, 98), (2, IDLE, 0)] * (END // 4))
    draw_curve(hang, "hang", [steps, (END - 7.4, WAITING, 100)])
    draw_curve(offload, "CPU offload", [(17.4, OFFLOAD, 40), *pauses])
    healthy.set_ylabel("%")
    figure.supxlabel("time (drawings, not measurements)", fontsize="medium", x=0.01, ha="left")
    handles = healthy.get_lines()[1::-1]  # power first
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
    return figure


FIGURES = {"cost": power_curves}
