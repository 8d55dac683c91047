"""Draw the figures of the pages.

python docs/figures/draw.py

Each family of figures has a file. Its FIGURES are the names of the figures and the functions that draw them.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import adapters
import batch_size
import collectives
import diagrams
import dimensions_figure
import fsdp
import long_texts
import memory_bars
import power_curves
import timelines
from style import save

FAMILIES = (
    adapters,
    batch_size,
    collectives,
    diagrams,
    dimensions_figure,
    fsdp,
    long_texts,
    memory_bars,
    power_curves,
    timelines,
)
FIGURES = {name: draw for family in FAMILIES for name, draw in family.FIGURES.items()}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        save(draw(), name)
        print(f"docs/figures/{name}.svg")
