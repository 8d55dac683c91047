"""The style that all figures of the pages share, and the functions with which they are drawn and saved.

A figure is an SVG file that is readable in light and in dark mode. Text and lines on its ground have the colour INK.
The file writes INK as currentColor: docs/site/page_markup.py puts the file into a page, so INK is the colour of the
page's text there, and the ground is transparent. A forge shows the file as an image, which cannot inherit a colour. For
this case the file has an ink and a ground of its own for each mode.

All figures are WIDTH inches wide, which is the width of a page's text, or PHONE_WIDTH inches wide if a telephone must
show them with readable text. One size of type serves all figures.
"""

import io
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.path
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

import palette
from reporting.colours import INK, SVG_STYLE
from reporting.colours import PARTS as MEMORY_PARTS

HERE = Path(__file__).resolve().parent
WIDTH = 7.36  # inches; a page of 1,280 pixels shows a figure 736 pixels wide, so 8 points are 11 pixels
PHONE_WIDTH = 4.2  # inches; a telephone shows a figure 350 pixels wide, so 8 points are 9 pixels
TYPE = 8  # points
RED = "#d03030"  # a limit or a stop, visible on a light and on a dark ground
DECIMALS = re.compile(r"(?<!scale\(0)(?<! -0)(\.\d\d)\d+")  # a text's scale keeps all of them
# Only the root of a file matches svg:root. A figure in a page does not
COLOURS = """<style>
   svg:root { color: black; background: white }
   @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3; background: #0d1117 } }
  </style>"""
CURVE = re.compile(r"C (?:\S+ ){4}(\S+ \S+)")  # two control points, and the end
STYLE = SVG_STYLE | {
    "font.size": TYPE,
    "axes.titlesize": TYPE,
    "axes.labelsize": TYPE,
    "legend.fontsize": TYPE,
    "legend.title_fontsize": TYPE,
    "xtick.labelsize": TYPE,
    "ytick.labelsize": TYPE,
    "figure.titlesize": TYPE,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
plt.rcParams |= STYLE
# Parts, phases and links as patches: bars and the squares of legends
PARTS, PHASES, LINKS = (
    {name: {"edgecolor": INK, "linewidth": 0.4, "facecolor": look["color"], "hatch": look.get("hatch")}
     for name, look in kind.items()}
    for kind in (MEMORY_PARTS, palette.PHASES, palette.LINKS)
)  # fmt: skip


def save(figure: Figure, name: str, folder: Path = HERE) -> None:
    """Write the figure to ``<folder>/<name>.svg``. The file is the same each time.

    Numbers have two decimals, which are hundredths of a point, and the dots of hatches have eight corners. Matplotlib's
    own files are about twice as large.
    """
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    svg = DECIMALS.sub(r"\1", drawn.getvalue())
    svg = re.sub(r"<pattern.*?</pattern>", prepare_hatch, svg, flags=re.DOTALL).replace(INK, "currentColor")
    # Matplotlib's own style would apply to all of a page that contains the figure
    svg = re.sub("<style.*?</style>", COLOURS, svg, count=1, flags=re.DOTALL)
    svg = svg.replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def prepare_hatch(pattern: re.Match) -> str:
    """Simplify the dots of a hatch. A hatch on a colour is black, because the colour is the same in both modes."""
    hatch = CURVE.sub(r"L \1", pattern[0])
    return hatch if 'fill="none"' in hatch else hatch.replace(INK, "#000000")


def figure_with_legend(height: float, legend: dict[str, dict], columns: int = 7, width: float = WIDTH, **grid: object):
    """Create a figure and its axes with a legend above them. legend: a name -> the patch's style."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", **grid)
    handles = [Patch(label=name, **style) for name, style in legend.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, handlelength=1.5,
                  columnspacing=1.2, borderaxespad=0.2)  # fmt: skip
    return figure, axes


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Create a figure without axes. Its coordinates are inches."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


Point = tuple[float, float]


class Sides(NamedTuple):
    """The middles of a box's sides, where arrows begin and end."""

    left: Point
    right: Point
    top: Point
    bottom: Point


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, ink=INK, **style: object) -> Sides:
    """Draw a rounded box with text in its middle. ink: the colour of the text."""
    style = {"facecolor": ("#4393c3", 0.15), "edgecolor": "#4a86b8"} | style
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.0,rounding_size=0.06", **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink)
    return sides(x, y, width, height)


def sides(x: float, y: float, width: float, height: float) -> Sides:
    middle_x, middle_y = x + width / 2, y + height / 2
    return Sides((x, middle_y), (x + width, middle_y), (middle_x, y + height), (middle_x, y))


def arrow(axes: Axes, *points: Point, **style: object) -> None:
    """Draw an arrow along the points. Its head is at the last point."""
    style = {"arrowstyle": "-|>", "mutation_scale": 7, "linewidth": 0.8, "color": INK} | style
    axes.add_patch(FancyArrowPatch(path=matplotlib.path.Path(points), **style))
