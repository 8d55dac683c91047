"""Draw what four ranks hold before and after each collective. A telephone shows this figure with readable text."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from palette import EMPTY, RANKS
from style import INK, PHONE_WIDTH, Point, arrow, canvas

SIZE = 4  # ranks, and parts of a tensor
CELL = 0.19  # inches
ROW = 0.23
GAP = 0.24
SUM = "Σ"
# A cell is the rank from which its number comes, or SUM, or None if it is empty
Row = list[int | str | None]
OWN: list[Row] = [[rank] * SIZE for rank in range(SIZE)]
NOTHING: Row = [None] * SIZE
SUMS: Row = [SUM] * SIZE
COLLECTIVES: dict[str, tuple[list[Row], list[Row]]] = {
    "broadcast": ([OWN[0], NOTHING, NOTHING, NOTHING], [OWN[0]] * SIZE),
    "reduce": (OWN, [SUMS, NOTHING, NOTHING, NOTHING]),
    "all-reduce": (OWN, [SUMS] * SIZE),
    "reduce-scatter": (OWN, [[SUM if part == rank else None for part in range(SIZE)] for rank in range(SIZE)]),
    "all-gather": (
        [[rank if part == rank else None for part in range(SIZE)] for rank in range(SIZE)],
        [list(range(SIZE))] * SIZE,
    ),
}


def collectives() -> Figure:
    height = 3 * (SIZE * ROW + 0.4)
    figure, axes = canvas(height, PHONE_WIDTH)
    for number, (name, (before, after)) in enumerate(COLLECTIVES.items()):
        x, y = place(number, height)
        axes.text(x, y + 0.07, name, va="bottom", weight="bold")
        draw_ranks(axes, (x, y), before)
        draw_ranks(axes, (x + SIZE * CELL + GAP, y), after)
        middle = y - (SIZE * ROW - ROW + CELL) / 2
        arrow(axes, (x + SIZE * CELL + 0.03, middle), (x + SIZE * CELL + GAP - 0.03, middle))
        if number % 2 == 0:
            axes.text(x - 0.06, y + 0.07, "rank", ha="right", va="bottom")
            for rank in range(SIZE):
                axes.text(x - 0.06, y - rank * ROW - CELL / 2, rank, ha="right", va="center")
    x, y = place(len(COLLECTIVES), height)
    for row, (cell, text) in enumerate(((1, "from rank 1, part 2"), (SUM, "sum over all ranks"), (None, "nothing"))):
        draw_cell(axes, (x, y - row * ROW - CELL), cell, 2)
        axes.text(x + CELL + 0.08, y - row * ROW - CELL / 2, text, va="center")
    return figure


def place(number: int, height: float) -> Point:
    """Return the upper left corner of a panel's cells."""
    return 0.38 + 1.99 * (number % 2), height - 0.3 - number // 2 * (SIZE * ROW + 0.4)


def draw_ranks(axes: Axes, corner: Point, ranks: list[Row]) -> None:
    for rank, row in enumerate(ranks):
        for part, cell in enumerate(row):
            draw_cell(axes, (corner[0] + part * CELL, corner[1] - rank * ROW - CELL), cell, part)


def draw_cell(axes: Axes, corner: Point, cell: int | str | None, part: int) -> None:
    """Draw a number of a tensor. Its colour and first digit are the rank from which it comes."""
    if cell is None:
        axes.add_patch(Rectangle(corner, CELL, CELL, linewidth=0.5, **EMPTY))
        return
    summed = cell == SUM
    look = {"facecolor": "#404040" if summed else RANKS[cell], "edgecolor": INK, "linewidth": 0.5}
    axes.add_patch(Rectangle(corner, CELL, CELL, zorder=1.5, **look))
    text, ink = (SUM, "white") if summed else (f"{cell}{part}", "black")
    axes.text(corner[0] + CELL / 2, corner[1] + CELL / 2, text, ha="center", va="center_baseline", color=ink)


FIGURES = {"collectives": collectives}
