"""Colours and hatches of the figures beyond the parts of memory, which scripts/reporting/colours.py has."""

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
