"""The figure of docs/batch-size.md: evaluation losses of the runs in batch-size.json, which used the laptop profile."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from style import INK, WIDTH

RUNS = Path(__file__).with_name("batch-size.json")
BATCHES = {
    16: {"color": INK, "marker": "o"},
    64: {"color": "#d6604d", "marker": "s"},
    256: {"color": "#4393c3", "marker": "^"},
}
RATES = {"the same rate": "-", "square root": "--", "linear": ":"}


def batch_size() -> Figure:
    """Draw the losses over questions and over steps."""
    figure, (questions, steps) = plt.subplots(1, 2, figsize=(WIDTH, 3), sharey=True, layout="constrained")
    for run in json.loads(RUNS.read_text()):
        how = {"linestyle": RATES[run["rate"]], "markersize": 3.5, "linewidth": 1.2, **BATCHES[run["batch"]]}
        questions.plot([step * run["batch"] for step in run["steps"]], run["losses"], **how)
        steps.plot(run["steps"], run["losses"], **how)
    questions.xaxis.set_major_formatter("{x:,.0f}")
    questions.set(xlabel="questions seen: what you pay", ylabel="evaluation loss")
    steps.set(xlabel="optimizer steps: the time, with enough GPUs", xscale="log")
    steps.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"], minor=False)
    steps.set_xticks([], minor=True)
    lines = {f"batch of {batch}": Line2D([], [], linestyle="", **how) for batch, how in BATCHES.items()}
    lines |= {
        f"rate: {rate.removesuffix(' rate')}": Line2D([], [], color=INK, linestyle=dashes)
        for rate, dashes in RATES.items()
    }
    figure.legend(lines.values(), lines, loc="outside upper left", ncols=6, frameon=False, columnspacing=1.2)
    return figure


FIGURES = {"batch-size": batch_size}
