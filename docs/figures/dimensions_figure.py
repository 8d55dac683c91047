"""Draw what two ranks have along each dimension, and what each of eight ranks sends.

A telephone shows this figure with readable text. Coordinates are inches.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dimensions import QUESTIONS, dimensions, tensor_sends_by_plan
from palette import EMPTY, PHASES, RANKS
from shared.units import GB
from style import INK, PHONE_WIDTH, Point, canvas

MESSAGES = {
    "data": "sends gradients, once in a step",
    "shard": "sends parameters of each block",
    "tensor": "sends activations, 4 times a block",
    "pipeline": "sends the stage's hidden states",
    "context": "sends keys and values per block",
}
HEIGHT = 6.95
SENT = PHASES["communication"]["color"]
HELD = {"edgecolor": INK, "linewidth": 0.6}
GATHERED = {"facecolor": "none", "edgecolor": INK, "hatch": "...", "linewidth": 0.6}
NOT_HELD = {"linewidth": 0.6, **EMPTY}
# The begin and end of what a rank has of a block or a question
Share = tuple[float, float]
WHOLE, NOTHING, HALVES = (0, 1), (0, 0), ((0, 0.5), (0.5, 1))


def share_of_block(dimension: str, rank: int, block: int) -> Share:
    if dimension == "pipeline":
        return WHOLE if block // 2 == rank else NOTHING
    return HALVES[rank] if dimension in ("shard", "tensor") else WHOLE


def share_of_question(dimension: str, rank: int, question: int) -> Share:
    if dimension in ("data", "shard"):
        return WHOLE if question // 2 == rank else NOTHING
    return HALVES[rank] if dimension == "context" else WHOLE


def dimensions_figure() -> Figure:
    figure, axes = canvas(HEIGHT, PHONE_WIDTH)
    draw_legend(axes, HEIGHT - 0.24)
    for number, (dimension, message) in enumerate(MESSAGES.items()):
        draw_dimension(axes, corner(number), dimension, message)
    draw_bytes(axes, corner(len(MESSAGES)))
    return figure


def corner(number: int) -> Point:
    """Return the upper left corner of a panel."""
    return 0.1 + 2.1 * (number % 2), HEIGHT - 0.38 - 2.2 * (number // 2)


def draw_legend(axes: Axes, y: float) -> None:
    for x, look, text in ((0.1, {"facecolor": RANKS[0], **HELD}, "held"), (1.0, GATHERED, "gathered for a moment"),
                          (2.95, NOT_HELD, "not held")):  # fmt: skip
        axes.add_patch(Rectangle((x, y), 0.28, 0.14, **look))
        axes.text(x + 0.36, y + 0.07, text, va="center")


def draw_dimension(axes: Axes, where: Point, dimension: str, message: str) -> None:
    x, y = where
    axes.text(x, y - 0.2, dimension, weight="bold")
    axes.text(x, y - 0.36, message)
    axes.text(x + 0.06, y - 0.96, "blocks", rotation=90, ha="center", va="center")
    axes.text(x + 0.06, y - 1.71, "questions", rotation=90, ha="center", va="center")
    for rank in range(2):
        left = x + 0.2 + 0.88 * rank
        axes.text(left + 0.4, y - 0.54, f"rank {rank}", ha="center")
        for number in range(4):
            block = (left, y - 0.76 - 0.18 * number, 0.14)
            question = (left, y - 1.51 - 0.15 * number, 0.11)
            draw_share(axes, block, rank, share_of_block(dimension, rank, number), gathers=dimension == "shard")
            draw_share(axes, question, rank, share_of_question(dimension, rank, number))


def draw_share(axes: Axes, where: tuple[float, float, float], rank: int, share: Share, *, gathers=False) -> None:
    """Draw what a rank has of a block or a question. where: x, y and height. gathers: the rank receives the rest."""
    x, y, height = where
    begin, end = (0.8 * edge for edge in share)
    axes.add_patch(Rectangle((x, y), 0.8, height, **(GATHERED if gathers else NOT_HELD)))
    if end > begin:
        axes.add_patch(Rectangle((x + begin, y), end - begin, height, facecolor=RANKS[rank], **HELD))


def draw_bytes(axes: Axes, where: Point) -> None:
    """Draw a bar for the bytes of each dimension."""
    found = dimensions()
    rows = {
        "data": found["data"].sent,
        "shard": found["shard"].sent,
        "tensor:\nMegatron-LM": found["tensor"].sent,
        "tensor:\ntransformers": QUESTIONS * tensor_sends_by_plan(),
        "pipeline": found["pipeline"].sent,
        "context": found["context"].sent,
    }
    x, top = where
    axes.text(x, top - 0.2, "GB that each of 8 ranks", weight="bold")
    axes.text(x, top - 0.36, "sends in a step", weight="bold")
    for row, (name, sent) in enumerate(rows.items()):
        y = top - 0.66 - 0.27 * row
        length = 0.75 * sent / max(rows.values())
        axes.text(x, y, name, va="center", linespacing=0.95)
        axes.add_patch(Rectangle((x + 0.78, y - 0.07), length, 0.14, facecolor=SENT, edgecolor=INK, linewidth=0.4))
        axes.text(x + 0.83 + length, y, f"{sent / GB:.1f}", va="center")


FIGURES = {"dimensions": dimensions_figure}
