"""Figures as SVG files that are readable in light and in dark mode, for the report and for the pages.

Text and lines on the ground of a figure have the colour INK, and the ground is transparent.
"""

import io
import re
from typing import Any

from matplotlib.figure import Figure

INK = "#000001"  # Matplotlib does not know currentColor, so as_svg replaces this colour
DECIMALS = re.compile(r"(?<!scale\(0)(?<! -0)(\.\d\d)\d+")  # a text's scale keeps all of them
CURVE = re.compile(r"C (?:\S+ ){4}(\S+ \S+)")  # two control points, and the end
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "hatch.linewidth": 0.5,
    "svg.fonttype": "path",  # readers lack matplotlib's font
    "svg.hashsalt": "workshop",  # without this, the names of patterns differ in each run
}


def as_svg(figure: Figure, light: str, dark: str) -> str:
    """Return the figure as SVG. The same figure gives the same text.

    light, dark: the CSS properties of the file's root in each mode, such as "color: black".

    Numbers have two decimals, which are hundredths of a point, and the dots of hatches have eight corners. Matplotlib's
    own files are about twice as large.
    """
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = DECIMALS.sub(r"\1", drawn.getvalue())
    svg = re.sub(r"<pattern.*?</pattern>", prepare_hatch, svg, flags=re.DOTALL).replace(INK, "currentColor")
    # Only the root of a file matches svg:root. Matplotlib's own style would apply to all of a page that contains the
    # figure
    style = f"""<style>
   svg:root {{ {light} }}
   @media (prefers-color-scheme: dark) {{ svg:root {{ {dark} }} }}
  </style>"""
    svg = re.sub("<style.*?</style>", style, svg, count=1, flags=re.DOTALL)
    return svg.replace("<svg ", '<svg stroke-linejoin="round" ', 1)


def prepare_hatch(pattern: re.Match) -> str:
    """Simplify the dots of a hatch. A hatch on a colour is black, because the colour is the same in both modes."""
    hatch = CURVE.sub(r"L \1", pattern[0])
    return hatch if 'fill="none"' in hatch else hatch.replace(INK, "#000000")
