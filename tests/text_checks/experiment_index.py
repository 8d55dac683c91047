"""The index of the experiments, their number, the list of those that need a GPU, and the bill of GPU-hours."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, directives_of
from text_checks.common import differences, read
from text_checks.tables import configs

INDEX = "experiments/README.md"
NO_EXPERIMENTS = ("gpu-check", "demo/plain", "demo/ddp", "demo/zero3", "demo/fsdp")  # no section teaches them
ROW = r"^\| `experiments/submit\.sh (\S+)` \| ([^|]+) \| (\d+ x \d+) \| (\S+) \| (?:\[(\d+)\]\(\.\./(\S+)\)|-) \|$"

SCRIPTS = {str(script.parent.relative_to(EXPERIMENTS)): script for script in EXPERIMENT_SCRIPTS}
TAUGHT = SCRIPTS.keys() - set(NO_EXPERIMENTS)


def findings() -> Iterator[str]:
    rows = re.findall(ROW, read(INDEX), re.MULTILINE)
    sections = {folder: (section, page) for folder, *_, section, page in rows}
    shown = {folder: row(folder, size, config) for folder, _, size, config, _, _ in rows}
    stated = {folder: row(folder, *size_and_config(script)) for folder, script in SCRIPTS.items()}
    yield from differences(INDEX, "experiments/", shown, stated)
    yield from numbers()
    yield from taught(sections)
    yield from needs_gpu({folder for folder, question, *_ in rows if question.endswith("(needs a GPU)")})
    yield from bill({folder: section for folder, (section, _) in sections.items()})


def row(folder: str, size: str, config: str) -> str:
    return f"| `experiments/submit.sh {folder}` | ... | {size} | {config} | ... |"


def size_and_config(script: Path) -> tuple[str, str]:
    asked = directives_of(script)
    config = re.search(r"(?:ds|fsdp)_configs/([\w.]+)", script.read_text(encoding="utf-8"))
    return f"{asked['nodes']} x {asked['gpus-per-node']}", f"`{config[1]}`" if config else "-"


def numbers() -> Iterator[str]:
    sentences = (
        (INDEX, "{} experiments, each"),
        ("README.md", "Each of the {} experiments"),
        ("README.md", "All {} jobs"),
    )
    for page, sentence in sentences:
        should_say = sentence.format(len(TAUGHT))
        if should_say not in read(page):
            found = re.search(sentence.format(r"\d+"), read(page))
            yield f"{page}: says {found[0] if found else 'no number'}, experiments/ says {should_say}"


def taught(sections: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The page of an experiment's section names the experiment's family."""
    for folder, (section, page) in sections.items():
        family = folder.split("/")[0]
        if not section and folder in TAUGHT:
            yield f"{INDEX}: {folder}: names no section; write [<number>](../docs/<page>)"
        elif page and family not in read(page):
            yield f"{INDEX}: {folder}: names section {section}, and {page} says nothing of {family}; link its own page"


def needs_gpu(marked: set[str]) -> Iterator[str]:
    """A CPU refuses CPU offload and FSDP1. The index marks these experiments, and the front page names them."""
    refused = [
        f"{name}.json"
        for name, config in configs("fsdp_configs").items()
        if config.get("cpu_offload") or config.get("version") == 1
    ]
    names = {folder for folder, script in SCRIPTS.items() if any(name in script.read_text() for name in refused)}
    mark = "(needs a GPU)"
    yield from differences(INDEX, "its config", dict.fromkeys(marked, mark), dict.fromkeys(names, mark))
    for folder in sorted(names):
        if f"`{folder}`" not in read("README.md"):
            yield f"README.md: does not name `{folder}`, which needs a GPU; add it to the experiments that need one"
        if directives_of(SCRIPTS[folder])["nodes"] != "1":
            yield f"README.md: says that experiments of one node need a GPU, {folder} needs one and has several nodes"


def bill(sections: dict[str, str]) -> Iterator[str]:
    """Compare jobs, GPUs and GPU-hours of each section."""
    page = "docs/instructor/README.md"
    rows = re.findall(r"^\| (\w+).* (\| \d+ \| \d+ \| \d+ \|)$", read(page).partition("## The bill")[2], re.MULTILINE)
    sums = defaultdict(lambda: [0, 0, 0.0])
    for folder in TAUGHT:
        asked = directives_of(SCRIPTS[folder])
        gpus = int(asked["nodes"]) * int(asked["gpus-per-node"])
        hours, minutes, _ = map(int, asked["time"].split(":"))
        for section in filter(None, (sections.get(folder), "All")):
            for place, amount in enumerate((1, gpus, gpus * (hours + minutes / 60))):
                sums[section][place] += amount
    stated = {f"bill, {key}": "| {} | {} | {:.0f} |".format(*values) for key, values in sums.items()}
    yield from differences(page, "experiments/", {f"bill, {key}": value for key, value in rows}, stated)
