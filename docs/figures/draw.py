"""Draw the figures of the pages.

PYTHONPATH=scripts python docs/figures/draw.py

Each family of figures has a file. Its FIGURES are the names of the figures and the functions that draw them.
"""

import batch_size
import memory_bars
import timelines
from style import save

FIGURES = memory_bars.FIGURES | timelines.FIGURES | batch_size.FIGURES

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        save(draw(), name)
        print(f"docs/figures/{name}.svg")
