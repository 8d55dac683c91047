"""Colours and hatches of the parts of memory, in the report, in the pages' figures and on the page "What fits where".

The style of figures that are readable in light and in dark mode is here, too. A colour with its hatch means the same
everywhere. Things also differ in lightness and hatching, so that readers can
tell them apart without colour.
"""

# Parts of memory. With the chunked loss, the logits are only those of one chunk
PARTS = {
    "parameters": {"color": "#1f4e79"},
    "gradients": {"color": "#e08a3c", "hatch": "///"},
    "optimizer state": {"color": "#a9d18e", "hatch": "..."},
    "buffers": {"color": "#8c8c8c", "hatch": "xxx"},
    "activations": {"color": "#ffe699"},
    "logits": {"color": "#9dc3e6", "hatch": "---"},
    "head": {"color": "#d9c3e8", "hatch": "|||"},
}

# Text and lines on the ground of a figure. In its file this is currentColor, which Matplotlib does not know
INK = "#000001"
SVG_STYLE: dict[str, object] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "hatch.linewidth": 0.5,
    "svg.fonttype": "path",  # readers lack matplotlib's font
    "svg.hashsalt": "workshop",  # without this, the names of patterns differ in each run
}
