"""Draw which rank computes which block of scores, with one piece of the text for each rank, and with zigzag.

A telephone shows this figure with readable text. Coordinates are inches.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from palette import EMPTY, RANKS
from style import INK, PHONE_WIDTH, Point, canvas

WORLD = 4
SIDE = 1.6  # of the square of all scores
HEIGHT = 2.5
ONE_PIECE = list(range(WORLD))  # owner of each piece of the text
ZIGZAG = ONE_PIECE + ONE_PIECE[::-1]


def long_texts() -> Figure:
    figure, axes = canvas(HEIGHT, PHONE_WIDTH)
    draw_scores(axes, (0.42, 0.32), ONE_PIECE, "one piece for each rank", "1, 2, 3 and 4 blocks")
    draw_scores(axes, (2.5, 0.32), ZIGZAG, "zigzag: two pieces", "9 smaller blocks each")
    return figure


def draw_scores(axes: Axes, corner: Point, owners: list[int], title: str, count: str) -> None:
    """Draw the scores of a text. corner: the lower left one. A row has the queries of a piece, a column its keys."""
    x, y = corner
    size = SIDE / len(owners)
    axes.text(x, y + SIDE + 0.3, title, weight="bold")
    axes.text(x + SIDE / 2, y + SIDE + 0.1, "keys", ha="center")
    axes.text(x + SIDE / 2, y - 0.2, count, ha="center")
    for row, rank in enumerate(owners):
        bottom = y + SIDE - (row + 1) * size
        axes.text(x - 0.06, bottom + size / 2, f"rank {rank}", ha="right", va="center")
        for column in range(len(owners)):
            look = {"facecolor": RANKS[rank], "edgecolor": INK, "linewidth": 0.6}
            if column == row:
                look["hatch"] = "////"
            elif column > row:
                look = {"linewidth": 0.6, **EMPTY}
            axes.add_patch(Rectangle((x + column * size, bottom), size, size, **look))


FIGURES = {"long-texts": long_texts}
