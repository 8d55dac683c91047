"""Colours and hatches of the report's plots, the pages' figures and the page "What fits where".

A colour with its hatch means the same everywhere. Things also differ in lightness and hatching, so that readers can
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
# What a rank does at a time
PHASES = {
    "data": {"color": "#d9d9d9"},
    "forward": {"color": "#c9c3e6"},
    "backward": {"color": "#5f539c"},
    "optimizer step": {"color": "#a9d18e", "hatch": "..."},
    "communication": {"color": "#01665e"},
    "wait": {"color": "none", "hatch": "//"},
}
LINKS = {
    "inside nodes": {"color": "#80cdc1"},
    "between nodes": {"color": "#01665e", "hatch": "///"},
}
RANKS = ["#cde3f2", "#f7d4b5", "#d5e8c8", "#efd6ec"]
EMPTY = {"facecolor": "none", "edgecolor": "#9a9a9a", "linestyle": "--"}
