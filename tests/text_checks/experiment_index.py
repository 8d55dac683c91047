"""Check the index of the experiments, their number, and the bill in GPU-hours and kWh. A finding shows the line."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, REPOSITORY, read_directives

INDEX = "experiments/README.md"
BILL = "docs/instructor/README.md"
ROW = r"^\| `experiments/submit\.sh (\S+)` \| (.+) \| \d+ x \d+ \| \S+ \| (-|\[\d+\]\(\.\./docs/\S+\)) \|$"
NOT_TAUGHT = ("demo", "gpu-check", "own-model")  # experiments that no section of the workshop runs
POWER_LIMIT = r"power limit is (\d+) W"  # the page's words; a cluster with other GPUs changes the number there
NEEDS_A_GPU = " (needs a GPU)"
DEFAULTS = {
    "nodes": "1",
    "gpus-per-node": "1",
    "time": "00:00:00",
}  # experiments.py reports a missing directive


def findings() -> Iterator[str]:
    rows = {folder: (question, section) for folder, question, section in re.findall(ROW, read(INDEX), re.MULTILINE)}
    scripts = {str(script.parent.relative_to(EXPERIMENTS)): script for script in EXPERIMENT_SCRIPTS}
    for folder in sorted(rows.keys() - scripts.keys()):
        yield f"{INDEX}: says experiments/submit.sh {folder}, but experiments/ has no such folder; remove the row"
    sections = {folder: find_section(folder, rows) for folder in scripts}
    for folder, script in scripts.items():
        question = rows.get(folder, ("<its question>",))[0].removesuffix(NEEDS_A_GPU)
        yield from check_row(folder, script, question, sections[folder])
    taught = {folder: script for folder, script in scripts.items() if folder.split("/")[0] not in NOT_TAUGHT}
    yield from section_names_experiment({folder: sections[folder] for folder in taught})
    jobs, _, hours = gpu_bill(taught.values())
    yield from numbers(jobs, hours)
    by_number = {"All": list(taught.values())}
    for folder, script in taught.items():
        by_number.setdefault(sections[folder].partition("]")[0].lstrip("["), []).append(script)
    yield from bill(by_number)


def read(page: str) -> str:
    path = REPOSITORY / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def find_section(folder: str, rows: dict[str, tuple[str, str]]) -> str:
    """Link of a folder to its section. A new folder gets the link of its family."""
    family = folder.split("/")[0]
    family_sections = [section for other, (_, section) in rows.items() if other.split("/")[0] == family]
    return rows[folder][1] if folder in rows else (*family_sections, "[?](../docs/?.md)")[0]


def check_row(folder: str, script: Path, question: str, section: str) -> Iterator[str]:
    """Compare a row with the nodes, GPUs and config of the script. The row must say if the config needs a GPU."""
    asked = DEFAULTS | read_directives(script)
    config = re.search(r"(ds|fsdp)_configs/[\w.]+", script.read_text())
    if config and needs_a_gpu(config[0]):
        question += NEEDS_A_GPU
        if asked["nodes"] != "1":
            yield f"experiments/{folder}: says --nodes={asked['nodes']}, README.md says that it needs a GPU on one node"
        if f"`{folder}`" not in read("README.md"):
            yield f"README.md: does not name `{folder}`, {config[0]} says that it needs a GPU; add the folder"
    size, config_name = f"{asked['nodes']} x {asked['gpus-per-node']}", f"`{Path(config[0]).name}`" if config else "-"
    line = f"| `experiments/submit.sh {folder}` | {question} | {size} | {config_name} | {section} |"
    if question == "<its question>" and folder in read(INDEX):
        yield f"{INDEX}: has <its question> for {folder}; write the question that the experiment answers"
    shown = [shown for shown in read(INDEX).splitlines() if f"submit.sh {folder}` |" in shown]
    if shown != [line]:
        yield f"{INDEX}: says {' and '.join(shown) or f'nothing about {folder}'}, its script says {line}"


def needs_a_gpu(config: str) -> bool:
    """Return True if a CPU cannot run this config, because it uses FSDP's CPU offload or FSDP1."""
    content = json.loads(read(config))
    return config.startswith("fsdp") and bool(content.get("cpu_offload") or content["version"] == 1)


def section_names_experiment(sections: dict[str, str]) -> Iterator[str]:
    for folder, section in sections.items():
        found = re.search(r"\.\./(docs/[\w-]+\.md)", section)
        if found and folder.split("/")[0] not in read(found[1]):
            yield f"{found[1]}: does not name {folder.split('/')[0]}, {INDEX} says that the page teaches it"


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


def gpu_bill(scripts: Iterable[Path]) -> tuple[int, int, int]:
    """Number of jobs, number of GPUs, and the maximum of GPU-hours."""
    jobs = gpus = hours = 0
    for script in scripts:
        asked = DEFAULTS | read_directives(script)
        job_gpus = int(asked["nodes"]) * int(asked["gpus-per-node"])
        hour, minute, _ = map(int, asked["time"].split(":"))
        jobs, gpus, hours = jobs + 1, gpus + job_gpus, hours + job_gpus * (hour + minute / 60)
    return jobs, gpus, round(hours)


def bill(by_number: dict[str, list[Path]]) -> Iterator[str]:
    section = read(BILL).partition("## The bill")[2]
    rows = re.findall(r"^(\| (\d+|All)\b([^|]*) \| .*)", section, re.MULTILINE)
    shown = {number: (line, title) for line, number, title in rows}
    for number in shown.keys() - by_number.keys():
        yield f"{BILL}: says {shown[number][0]}, {INDEX} does not name section {number}; remove the row"
    limit = re.search(POWER_LIMIT, section)
    if not limit:
        yield f"{BILL}: does not state the power limit of one GPU; write 'their power limit is 300 W'"
        return
    for number, scripts in by_number.items():
        says, title = shown.get(number, (f"nothing about section {number}", " <title>"))
        jobs, gpus, hours = gpu_bill(scripts)
        line = f"| {number}{title} | {jobs} | {gpus} | {hours} | {hours * int(limit[1]) / 1000:.1f} |"
        if says != line:
            yield f"{BILL}: says {says}, experiments/ says {line}"
