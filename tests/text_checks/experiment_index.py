"""Check the index of the experiments, their number, and the bill of GPU-hours. A finding has the line to write."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, REPOSITORY, directives_of

INDEX = "experiments/README.md"
BILL = "docs/instructor/README.md"
ROW = r"^\| `experiments/submit\.sh (\S+)` \| (.+) \| \d+ x \d+ \| \S+ \| (-|\[\d+\]\(\.\./docs/\S+\)) \|$"
NOT_TAUGHT = ("demo", "gpu-check")  # no section of the workshop runs them
NEEDS_A_GPU = " (needs a GPU)"


def findings() -> Iterator[str]:
    rows = {folder: (question, section) for folder, question, section in re.findall(ROW, read(INDEX), re.MULTILINE)}
    scripts = {str(script.parent.relative_to(EXPERIMENTS)): script for script in EXPERIMENT_SCRIPTS}
    for folder in rows.keys() - scripts.keys():
        yield f"{INDEX}: says experiments/submit.sh {folder}, experiments/ says nothing of it; remove its row"
    sections = {folder: section_of(folder, rows) for folder in scripts}
    for folder, script in scripts.items():
        question = rows.get(folder, ("<its question>",))[0].removesuffix(NEEDS_A_GPU)
        yield from row_of(folder, script, question, sections[folder])
    taught = {folder: script for folder, script in scripts.items() if folder.split("/")[0] not in NOT_TAUGHT}
    yield from taught_by_its_section({folder: sections[folder] for folder in taught})
    totals = bill_of(taught.values())
    yield from numbers(len(taught), totals[2])
    for section in dict.fromkeys(sections[folder] for folder in taught):
        number = re.sub(r"\[(\w+)\].*", r"\1", section)
        yield from line_of_the_bill(number, bill_of(taught[folder] for folder in taught if sections[folder] == section))
    yield from line_of_the_bill("All", totals)


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def section_of(folder: str, rows: dict[str, tuple[str, str]]) -> str:
    """The link of a folder to its section: its own, or for a new folder that of its family."""
    family = folder.split("/")[0]
    of_the_family = [section for other, (_, section) in rows.items() if other.split("/")[0] == family]
    return rows[folder][1] if folder in rows else (*of_the_family, "[<number>](../docs/<page>)")[0]


def row_of(folder: str, script: Path, question: str, section: str) -> Iterator[str]:
    """Compare a row with nodes, GPUs and config of the script, and with whether the config needs a GPU."""
    asked = directives_of(script)
    config = re.search(r"(ds|fsdp)_configs/[\w.]+", script.read_text())
    if config and needs_a_gpu(config[0]):
        question += NEEDS_A_GPU
        if f"`{folder}`" not in read("README.md"):
            yield f"README.md: says nothing of `{folder}`, {config[0]} says that it needs a GPU; add it"
    size, config_name = f"{asked['nodes']} x {asked['gpus-per-node']}", f"`{Path(config[0]).name}`" if config else "-"
    line = f"| `experiments/submit.sh {folder}` | {question} | {size} | {config_name} | {section} |"
    shown = [shown for shown in read(INDEX).splitlines() if f"submit.sh {folder}` |" in shown]
    if shown != [line]:
        yield f"{INDEX}: says {' and '.join(shown) or f'nothing of {folder}'}, its script says {line}"


def needs_a_gpu(config: str) -> bool:
    """Whether a CPU refuses this config: it has FSDP's CPU offload, or FSDP1."""
    content = json.loads(read(config))
    return config.startswith("fsdp") and bool(content.get("cpu_offload") or content["version"] == 1)


def taught_by_its_section(sections: dict[str, str]) -> Iterator[str]:
    for folder, section in sections.items():
        found = re.search(r"\.\./(docs/[\w-]+\.md)", section)
        if found and folder.split("/")[0] not in read(found[1]):
            yield f"{found[1]}: says nothing of {folder.split('/')[0]}, {INDEX} says that it is taught there"


def numbers(experiments: int, hours: int) -> Iterator[str]:
    for page, sentence in (
        (INDEX, f"{experiments} experiments, each a folder"),
        ("README.md", f"Each of the {experiments} experiments"),
        ("README.md", f"All {experiments} jobs"),
        (BILL, f"{experiments} experiments must run"),
        ("docs/instructor/own-copy.md", f"[{hours} GPU-hours at most]"),
    ):
        if sentence not in read(page):
            shown = re.search(re.sub(r"\d+", r"\\d+", sentence).replace("[", r"\["), read(page))
            yield f"{page}: says {shown[0] if shown else 'another sentence'}, experiments/ says {sentence}"


def bill_of(scripts: Iterator[Path]) -> tuple[int, int, int]:
    """Number of jobs, their GPUs, and GPU-hours at most."""
    jobs = gpus = hours = 0
    for asked in map(directives_of, scripts):
        gpus_of_the_job = int(asked["nodes"]) * int(asked["gpus-per-node"])
        hour, minute, _ = map(int, asked["time"].split(":"))
        jobs, gpus, hours = jobs + 1, gpus + gpus_of_the_job, hours + gpus_of_the_job * (hour + minute / 60)
    return jobs, gpus, round(hours)


def line_of_the_bill(number: str, totals: tuple[int, int, int]) -> Iterator[str]:
    bill = read(BILL).partition("## The bill")[2]
    shown = re.search(rf"^\| ({number}\b[^|]*) \| .*", bill, re.MULTILINE)
    line = f"| {shown[1] if shown else f'{number} <title>'} | {' | '.join(map(str, totals))} |"
    if not shown or shown[0] != line:
        yield f"{BILL}: says {shown[0] if shown else f'nothing of section {number}'}, experiments/ says {line}"
