"""Blocks of the pages whose contents other files already have. `make pages` writes them between the markers in a page:

    <!-- [[[cog import generated; generated.bill() ]]] -->
    <!-- [[[end]]] -->

`make lint` runs the same with --check, and fails if a page no longer agrees with the files. Run in the repository's
folder.
"""

import ast
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from config import CUSTOM_SIZES, KNOBS, TRAINER_FLAGS, DataArguments, ModelArguments
from job.directives import gpus_per_node, read_directives
from reporting.classroom_plan import AGENDAS, SECTIONS, ClassPlan, choices, gpu_hours, gpus
from reporting.definitions import table_definition
from reporting.metrics import column_header
from shared.units import GB, GIB

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
BLOCK = re.compile(r"\[\[\[cog.*?\[\[\[end\]\]\]", re.DOTALL)
WORDS_PER_MINUTE = 120  # reading speed of a person whose first language is not English
POWER_LIMIT_W = 300  # power limit of a V100-SXM2, the GPU of the original documents


def show(*lines: str) -> None:
    """Print the lines of a block, with the empty lines that Markdown needs around them."""
    print("", *lines, "", sep="\n")


def show_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    lines = [heads, ["---"] * len(heads), *rows]
    show(*(f"| {' | '.join(map(str, line))} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines))


def source(path: str, name: str) -> None:
    """Print a function of a Python file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    (function,) = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name == name]
    show("```python", *text.splitlines()[function.lineno - 1 : function.end_lineno], "```")


def box(page: str) -> None:
    """Print the box of another page: its lines that begin with >."""
    show(*re.findall(r"^>.*", page_text(page), re.MULTILINE))


# --- sections and experiments


def page_text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@cache
def title(page: str) -> tuple[str, str]:
    """Return the number of a section ("" if it has none) and its title, as its heading says them."""
    number, heading = re.findall(r"^# (?:(\d+)\. )?(.*)", page_text(page))[0]
    return number, heading


@cache
def minutes(page: str) -> int:
    """Return the time of a page: that of its commands and exercises, and that of its words, in steps of 5 minutes."""
    text = page_text(page)
    stated = re.search(r"^\| Hands-on \| (\d+) min", text, re.MULTILINE)
    reading = len(BLOCK.sub("", text).split()) / WORDS_PER_MINUTE
    return 5 * math.ceil(((int(stated[1]) if stated else 0) + reading) / 5)


def folder(script: Path) -> str:
    return str(script.parent.relative_to(EXPERIMENTS))


@cache
def scripts() -> dict[str, Path]:
    """Return the script of each experiment folder, without those of a site's own experiments."""
    found = {folder(script): script for script in sorted(EXPERIMENTS.rglob("*.slurm"))}
    return {name: script for name, script in found.items() if not name.startswith("own/")}


def section_of(name: str) -> str:
    """Return the page that teaches an experiment; "" for an experiment that no section runs."""
    families = {family: page for page, entry in SECTIONS.items() for family in entry.get("teaches", [])}
    known = [family for family in families if f"{name}/".startswith(f"{family}/")]
    return families[max(known, key=len)] if known else ""


def taught() -> list[str]:
    return [name for name in scripts() if section_of(name)]


def config_of(name: str) -> Path | None:
    found = re.search(r"(?:ds|fsdp)_configs/[\w.]+", scripts()[name].read_text(encoding="utf-8"))
    return ROOT / found[0] if found else None


def needs_a_gpu(config: Path | None) -> bool:
    """Return True if a CPU cannot run this config, because it uses FSDP's CPU offload or FSDP1."""
    if not config or config.parent.name != "fsdp_configs":
        return False
    content = json.loads(config.read_text(encoding="utf-8"))
    return bool(content.get("cpu_offload") or content["version"] == 1)


def index(*families: str) -> None:
    """Print the experiments of some families, with the first line of each script's comment."""
    pages = {section_of(family) for family in families}
    rows = []
    for name, script in scripts().items():
        page = section_of(name)
        if not any(f"{name}/".startswith(f"{family}/") for family in families) or page not in pages:
            continue
        about = script.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
        config = config_of(name)
        asked = read_directives(script)
        if needs_a_gpu(config):
            about += " It needs a GPU."
        rows.append(
            [
                f"`experiments/submit.sh {name}`",
                about,
                f"{asked['nodes']} x {gpus_per_node(asked)}",
                f"`{config.name}`" if config else "-",
                f"[{title(page)[0]}](../docs/{page}.md)" if page else "-",
            ]
        )
    show_table(["Command", "What it runs", "Nodes x GPUs", "Config", "Section"], rows)


def workshop_map(docs: str = "docs/") -> None:
    """Print the map of README.md. docs/site/page_markup.py makes the site's navigation from it.

    docs: path of docs/ as seen from the page.
    """
    afternoon = {row.get("page") for row in AGENDAS["agendas"]["afternoon"]["rows"]}
    rows: list[list[str]] = []
    for group, pages in AGENDAS["sections"].items():
        rows.append(["", f"**{group}**", "", "", ""])
        for page, entry in pages.items():
            number, name = title(page)
            marked = "yes" if page in afternoon else ""
            rows.append([number, f"[{name}]({docs}{page}.md)", f"{minutes(page)} min", entry.get("gpus", "-"), marked])
    show_table(["", "Section", "Time", "GPUs", "Afternoon"], rows)


def reference_pages() -> None:
    """Print the pages of docs/ that the map does not have."""
    pages = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - {*SECTIONS, "README"})
    show("To look something up:", "", *(f"- [{title(page)[1]}]({page}.md)" for page in pages))


def number_of_experiments() -> None:
    hours = round(sum(map(gpu_hours, taught())))
    index_link, bill_link = "[experiments](experiments/README.md)", "[the bill](docs/instructor/README.md#the-bill)"
    show(f"All {len(taught())} jobs are in {index_link}, and take at most {hours} GPU-hours ({bill_link}).")


# --- code

SCRIPTS = ROOT / "scripts"
CORE = ("train.py", "config.py", "data_loader.py", "model.py", "models/lora.py", "training/trainer.py")
FOLDERS = {
    "A training run": ("settings", "guard", "tasks", "models", "training", "distributed", "measure", "records"),
    "A job": ("job",),
    "Before and after a run": ("checks", "estimate", "reporting"),
}


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def core(scripts: str = "") -> None:
    """Print the files that explain a training run, in the order in which to read them.

    scripts: path of scripts/ as seen from the page.
    """
    lines = sum(len((SCRIPTS / name).read_text(encoding="utf-8").splitlines()) for name in CORE)
    files = [f"{place}. [{name}]({scripts}{name}): {first_line(SCRIPTS / name)}" for place, name in enumerate(CORE, 1)]
    show(f"To read the code, begin with its core, {len(CORE)} files with about {round(lines, -2):,} lines:", "", *files)


def other_files() -> None:
    paths = [path for path in sorted(SCRIPTS.glob("*.py")) if path.name not in CORE]
    show_table(["File", "What it does"], [[f"[{path.name}]({path.name})", first_line(path)] for path in paths])


def folders() -> None:
    """Print the folders of scripts/ by purpose; those that FOLDERS does not name are last."""
    named = [name for names in FOLDERS.values() for name in names]
    rest = sorted({path.parent.name for path in SCRIPTS.glob("*/__init__.py")} - {*named})
    rows = []
    for purpose, names in [*FOLDERS.items(), ("All of these", rest)]:
        rows.append([f"**{purpose}**", ""])
        rows += [[f"[{name}/]({name})", first_line(SCRIPTS / name / "__init__.py")] for name in names]
    show_table(["Folder", "What it has"], rows)


# --- instructors


def clock(time: int) -> str:
    return f"{time // 60}:{time % 60:02}"


def schedule(name: str) -> Iterator[tuple[int, int, dict]]:
    """Yield start, length and row of each part of an agenda, in minutes."""
    now = 0
    for row in AGENDAS["agendas"][name]["rows"]:
        length = row.get("minutes", minutes(row["page"]) if "page" in row else 0)
        yield now, length, row
        now = 0 if row.get("ends_day") else now + length


def numbers_in_words(numbers: list[int]) -> str:
    """Write sorted numbers, with ranges of three or more: 1, 3, 12 to 17."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = [f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in ranges]
    return ", ".join(words)


def agenda(name: str) -> None:
    ends = [start + length for start, length, row in schedule(name) if row.get("ends_day")]
    *_, (start, length, _) = schedule(name)
    hours = " and ".join(clock(end).replace(":", " h ") for end in [*ends, start + length])
    lines = [f"| {AGENDAS['agendas'][name]['title']} ({hours}) | |", "| --- | --- |"]
    for start, length, row in schedule(name):
        what = row.get("pause", "")
        if page := row.get("page"):
            number, heading = title(page)
            what = f"[{f'{number} {heading}'.strip()}](../{page}.md) ({length} min)"
            what += f": {row['do']}" if "do" in row else ""
        lines.append(f"| {clock(start)} | {what} |")
    present = {title(row["page"])[0] for _, _, row in schedule(name) if "page" in row}
    left_out = sorted(int(title(page)[0]) for page in SECTIONS if title(page)[0] and title(page)[0] not in present)
    show(*lines, "", f"Left out: sections {numbers_in_words(left_out)}.")


def time_plan() -> None:
    """Print the afternoon as plain text, for a mail."""
    names = [(start, row.get("pause") or title(row["page"])[1]) for start, _, row in schedule("afternoon")]
    end = max(start + length for start, length, _ in schedule("afternoon"))
    show("```text", *(f"  {clock(start)}  {name}" for start, name in [*names, (end, "End")]), "```")


def submissions(page: str) -> list[str]:
    """Return what submits all experiments of a section: the words after experiments/submit.sh."""
    lines = []
    for family in SECTIONS[page].get("teaches", []):
        inside = [name for name in scripts() if f"{name}/".startswith(f"{family}/")]
        own = [name for name in inside if section_of(name) == page]
        # A chain would also submit what another section teaches
        lines += [f"--chain {family}"] if len(inside) > 1 and own == inside else own
    return lines


def agenda_commands(name: str) -> None:
    """Print the commands with which the instructor runs all experiments of an agenda."""
    commands = [words for page in ClassPlan(agenda=name).pages for words in submissions(page)]
    show("```bash cluster", *(f"experiments/submit.sh --snapshot {words}" for words in commands), "make report", "```")


def in_words(entry: str) -> str:
    number, _, pattern = entry.rpartition(" of ")
    return f"{number} of `{pattern}`" if number else f"`{entry}`"


def who_runs_what() -> None:
    rows = []
    for page, entry in SECTIONS.items():
        if "pair" in entry or "shared" in entry:
            jobs = [", ".join(map(in_words, entry.get(kind, []))) for kind in ("pair", "shared")]
            rows.append([title(page)[0], *jobs])
    show_table(["Section", "Each pair", "Shared by the class, submitted by the instructor"], rows)


def turns() -> None:
    """Print what an afternoon takes for a class of 20 people on 16 GPUs."""
    needs = ClassPlan().needs()
    show_table([*needs[0]][:-1], [[*row.values()][:-1] for row in needs])


def bill() -> None:
    """Print the GPU-hours and kWh that one run of every folder takes at most."""
    by_page: dict[str, list[str]] = {page: [] for page in SECTIONS}
    for name in taught():
        by_page[section_of(name)].append(name)
    rows = []
    for label, names in [*((" ".join(title(p)), n) for p, n in by_page.items() if n), ("All", taught())]:
        hours = round(sum(map(gpu_hours, names)))
        kwh = f"{hours * POWER_LIMIT_W / 1000:.1f}"
        rows.append([label, len(names), sum(map(gpus, names)), hours, kwh])
    show_table(["Section", "Jobs", "GPUs that all jobs ask for", "GPU-hours at most", "kWh at most"], rows)


def job_commands(page: str, place: str) -> list[str]:
    """Return the commands of a pair, or of the shared jobs. Where a pair chooses, two or one of them are examples.

    place: cluster or laptop. A laptop only shows what a job of several nodes would run.
    """
    lines = []
    for number, among in [*choices(page, "pair")] or choices(page, "shared"):
        if len(among) > number:
            parent = os.path.commonpath(among)
            lines.append(f"# choose {number}: {', '.join(name.removeprefix(f'{parent}/') for name in among)}")
        examples = [name for name in SECTIONS[page].get("examples", []) if name in among]
        for name in examples or among[-number:]:
            if place == "laptop" and needs_a_gpu(config_of(name)):
                continue
            script = scripts()[name]
            if place == "cluster":
                lines.append(f"{SECTIONS[page].get('set', '')} experiments/submit.sh {name}".lstrip())
            else:
                dry_run = "DRY_RUN=1 " if read_directives(script)["nodes"] != "1" else ""
                lines.append(f"(cd experiments/{name} && SITE=laptop {dry_run}bash {script.name})")
    return lines


def start_now(page: str) -> None:
    """Print what a pair of a class types, then what a reader without a class types."""
    lines = ["In a class, your instructor has submitted these jobs.", "", "On a cluster, self-study:"]
    if "pair" in SECTIONS[page]:
        lines = [
            "On a cluster, in a class:",
            "",
            "```bash cluster",
            *job_commands(page, "cluster"),
            "```",
            "",
            "Self-study:",
        ]
    lines += ["", "```bash cluster", *(f"experiments/submit.sh {words}" for words in submissions(page)), "```"]
    laptop = job_commands(page, "laptop")
    shows = ", this prints [what the job would run](cluster.md#see-a-job-before-it-runs)"
    lines += ["", f"On a laptop{shows if 'DRY_RUN' in laptop[-1] else ''}:", "", "```bash", *laptop, "```"]
    show(*lines)


def sheet_commands(place: str) -> None:
    """Print the commands of the afternoon. place: cluster or laptop."""
    lines = ["# experiments/afternoon.sh runs all of these"] if place == "laptop" else []
    for page in ClassPlan().pages:
        if "pair" in SECTIONS[page]:
            lines += [f"# Section {title(page)[0]}", *job_commands(page, place)]
    show(f"```bash{' cluster' if place == 'cluster' else ''}", *lines, "```")


def afternoon_script() -> None:
    """Print the body of experiments/afternoon.sh: the laptop's commands of each section, below its time and title."""
    lines = ["set -v # print each line below before it runs"]
    for start, length, row in schedule("afternoon"):
        lines += ["", f"# === {clock(start)}  {row.get('pause', '')}"]
        if page := row.get("page"):
            in_page = re.findall(r"^## Start now$.*?^```bash\n(.*?)^```", page_text(page), re.MULTILINE | re.DOTALL)
            lines[-1] += f"{' '.join(title(page)).lstrip()} ({length} minutes, docs/{page}.md)"
            lines += job_commands(page, "laptop") or re.sub(" +#", " #", "".join(in_page)).splitlines()
    show(*lines, "", f"exit # {clock(start + length)}  End")


# --- settings


def knobs(group: str) -> None:
    """Print the knobs of a group with their flags, defaults and meanings. group: model, custom-gpt, data or trainer."""
    groups = {
        "model": {field.name for field in fields(ModelArguments)} - {*CUSTOM_SIZES},
        "custom-gpt": {*CUSTOM_SIZES},
        "data": {field.name for field in fields(DataArguments)},
        "trainer": {knob.flag for knob in TRAINER_FLAGS},
    }
    rows = []
    for knob in KNOBS:
        if knob.flag in groups[group]:
            assert knob.meaning, f"scripts/config.py: {knob.variable} has no meaning; write one"
            default = "" if knob.default is None else f"`{knob.default}`"
            may_change = "no" if knob.changes == "training" else "yes"
            rows.append([f"`{knob.variable}`", f"`--{knob.flag}`", default, knob.meaning, may_change])
    show_table(["Variable", "Flag", "Default", "Meaning", "May change when a run resumes"], rows)


def configs(name: str) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / name).glob("*.json"))}


def deepspeed_configs() -> None:
    rows = []
    for name, config in configs("ds_configs").items():
        zero = config["zero_optimization"]
        parts = {"optimizer": zero.get("offload_optimizer"), "parameters": zero.get("offload_param")}
        offloaded = {part: section for part, section in parts.items() if section}
        pinned = {"yes" if section["pin_memory"] else "no" for section in offloaded.values()}
        rows.append([f"`{name}`", zero["stage"], ", ".join(offloaded), ", ".join(pinned)])
    rows.sort(key=lambda row: (row[1], row[2] != "", len(row[2]), row[3]))
    show_table(["File", "ZeRO stage", "Offloaded to the CPU", "Pinned"], rows)


def fsdp_configs() -> None:
    rows = []
    for name, config in configs("fsdp_configs").items():
        hybrid, keeps = "dp_shard_size" in config, config.get("reshard_after_forward") is False
        strategy = "HYBRID_SHARD" if hybrid else "SHARD_GRAD_OP" if keeps else "FULL_SHARD"
        between = "parameters stay gathered" if keeps else "parameters are freed, and gathered again"
        between += "; activations are computed again" if config.get("activation_checkpointing") else ""
        between += "; shards are in CPU memory" if config.get("cpu_offload") else ""
        version = " of FSDP1" if config.get("version") == 1 else ""
        size = config.get("dp_shard_size")
        over = f"{size} ranks; the groups are replicas" if isinstance(size, int) else "the ranks of a node"
        rows.append([f"`{name}`", f"`{strategy}`{version}", between, over if hybrid else "all ranks"])
    show_table(["File", "Strategy", "Between forward and backward pass", "Sharded over"], rows)


# --- tables to fill in


WHERE = {  # metric -> where a reader finds its value
    "train_loss": "`train_loss` in the line with `train_runtime`: the mean over all steps",
    "eval_loss": "last `eval_loss`",
    "eval_loss_1": "first `eval_loss`",
    "eval_loss_2": "second `eval_loss`",
    "eval_loss_3": "third `eval_loss`",
    "samples_per_second": "`train_samples_per_second`",
    "eval_samples_per_second": "`eval_samples_per_second`",
    "steps_per_epoch": "`steps per epoch` in the table of knobs",
    "exact_match": "the line `exact_match`",
    "f1": "the same line",
    "kwh": "`kwh` in the run record, under `energy`",
    "joules_per_question": "`joules_per_question`, the same place",
    "callback_gpu_mib": "`avg_mem_alloc_MB` in the run record, under `callbacks`",
    "gpu_utilisation": "`avg_gpu_util_%`, the same place",
    "sm_activity": "`sm_percent` in the run record, under `gpu_activity`",
    "mfu": "`mfu_percent` in the run record, under `train`",
    "peak_gpu": "[one-liners](one-liners.md#gpu-memory)",
    "mean_gpu": "the same place",
    "peak_cpu": "[one-liners](one-liners.md#cpu-memory)",
    "mean_cpu": "the same place",
}


def fill_in(
    table: str,
    *columns: str,
    rows: Sequence[str] = (),
    across: bool = False,
    where: bool = False,
    more: Sequence[str] = (),
) -> None:
    """Print an empty table for the reader, with the names of a table of experiments/tables.yaml.

    columns: metrics, as in tables.yaml. rows: labels; default: those of the table. across: write the rows as columns.
    where: say where each value is found, for a single run. more: columns that the report does not have.
    """
    definition = table_definition(table)
    names = [definition.names.get(each) or column_header(each, definition.reference) for each in columns]
    names = [*names, *more]
    labels = list(rows) or [row.label for row in definition.rows]
    if where:
        show_table(
            ["Metric", "Where", "Your value"],
            [[name, WHERE[each], ""] for name, each in zip(names, columns, strict=True)],
        )
        return
    first, down, along = ("Metric", names, labels) if across else (definition.title, labels, names)
    show_table([first, *along], [[label, *[""] * len(along)] for label in down])


# --- measured and computed numbers


@cache
def load(path: str) -> ModuleType:
    """Import a program of benchmarks/ or docs/figures/ by its path. Its name may be that of a folder of scripts/."""
    file = ROOT / path
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    specification = spec_from_file_location(f"{file.parent.name}.{file.stem}", file)
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


COMMUNICATION = {
    "": ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FULL_SHARD"],
    "zero": ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
    "fsdp": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 2 x 2"],
}


def communication(section: str = "") -> None:
    """Print the bytes that the methods of a section send, as benchmarks/communication.py counted them."""
    benchmark = load("benchmarks/communication.py")
    show(benchmark.page_table(benchmark.read_results(), COMMUNICATION[section]))


def tensor_parallel() -> None:
    """Print what a rank sends and holds when section 16's model trains on 4 questions in a step, by the estimate."""
    from estimate.command_line import parse_plan
    from estimate.communication import sent_bytes
    from estimate.memory import estimate_parts, totals
    from estimate.model_shape import trace_shape

    model = "--model_name custom-gpt --per_device_train_batch_size 1 --bf16"
    rows = []
    for name, accumulation, flags in (
        ("FSDP 2", 2, "--fsdp --gpus 2"),
        ("TP 2", 4, "--tensor_parallel 2"),
        ("FSDP 4", 1, "--fsdp --gpus 4"),
        ("TP 4", 4, "--tensor_parallel 4"),
        ("TP 2 x FSDP 2", 2, "--tensor_parallel 2 --fsdp --gpus 4"),
    ):
        words = f"{model} {flags} --gradient_accumulation_steps {accumulation}".split()
        settings = parse_plan(words, environment={})
        sent, held = sent_bytes(trace_shape(settings), settings) / GB, totals(estimate_parts(settings), 1)[0] / GIB
        rows.append([name, f"1 x {accumulation}", f"{sent:.2f}", f"{held:.1f}"])
    show_table(["", "Micro batch x accumulation", "GB that a rank sends in a step", "GiB that a rank holds"], rows)


def prediction() -> None:
    benchmark = load("benchmarks/prediction.py")
    show(f"{benchmark.summary(benchmark.read_results())}.")


def efficiency_on_a_cpu() -> None:
    benchmark = load("benchmarks/training.py")
    show(benchmark.page_table(benchmark.read_results()))


def seeds() -> None:
    """Print mean and spread of the training runs of benchmarks/seeds.py, which differ only in the seed."""
    heads = ("Ten seeds", "Mean", "Standard deviation", "Smallest", "Largest")
    numbers = {"Evaluation loss": "eval_loss", "EM (%)": "exact_match", "F1 (%)": "f1"}
    rows = []
    for title, name in numbers.items():
        values = of_seeds(name)
        spread = (statistics.fmean(values), statistics.stdev(values), min(values), max(values))
        rows.append([title, *(f"{number:.{2 if 'loss' in name else 1}f}" for number in spread)])
    show_table(heads, rows)


def chance(name: str, what: str) -> None:
    """Print a sentence with the smallest and largest number of these runs. what: words for the number `name`."""
    low, high = (f"{number:.2g}" for number in (min(of_seeds(name)), max(of_seeds(name))))
    table = "[chance](baseline.md#what-chance-does)"
    show(
        f"Ten runs of SmolLM2 that differed only in the seed had {what} from {low} to {high} ({table}). "
        "Two runs can differ as much if they differ in the seed or in their questions."
    )


def of_seeds(name: str) -> list[float]:
    runs = json.loads((ROOT / "benchmarks" / "seeds.json").read_text(encoding="utf-8"))["runs"]
    assert len(runs) == 10, "the pages say ten"
    return [run[name] for run in runs]


def gpu_check() -> None:
    """Print the runs of `make gpu-check` on an H200."""
    from gpu_check import results_markdown

    measured = json.loads((ROOT / "benchmarks" / "gpu_check.json").read_text(encoding="utf-8"))
    shown = ("status", "precision", "samples_per_second", "peak_gpu_gib", "estimated_gib", "pinned_gib")
    rows = {name: {key: row[key] for key in shown if key in row} for name, row in measured["rows"].items()}
    show(*(line for line in results_markdown(measured | {"rows": rows}).splitlines() if line.startswith("|")))


def efficiency_on_a_gpu() -> None:
    """Print the runs of section 3 on an H200. Each row of the table is a row of benchmarks/gpu_runs.json."""
    rows = json.loads((ROOT / "benchmarks" / "gpu_runs.json").read_text(encoding="utf-8"))["rows"]
    labels = {
        "recipe": "recipe (fp32)",
        "dynamic_padding": "+ dynamic padding",
        "attention": "+ SDPA attention",
        "no_padding": "+ no padding",
        "bf16": "+ bf16",
        "chunked_loss": "+ chunked loss",
        "activation_checkpointing": "+ activation checkpointing",
        "all": "chunked loss, 16 at once (`all`)",
        "all-64": "`all`, 64 at once",
        "baseline-fp16": "the baseline of section 2 (fp16)",
    }
    slowest = rows["recipe"]["samples_per_second"]
    table = []
    for name, label in labels.items():
        run = rows[name]
        speed = run["samples_per_second"]
        energy, peak = f"{run['joules_per_question']:.1f}", f"{run['peak_gpu_gib']:.1f}"
        table.append([label, f"{speed:.0f}", f"{run['mfu_percent']:.0f}", energy, peak, f"{speed / slowest:.1f}x"])
    heads = ["One H200", "Samples/s", "[MFU](glossary.md#flops-mfu) (%)", "J per question", "Peak GiB", "Speed"]
    show_table(heads, table)


@cache
def gib(flags: str, part: str = "") -> float:
    """Return the GiB on a GPU that estimate_memory.py prints for these flags: of a part, or in all."""
    from estimate.command_line import parse_memory_plan
    from estimate.memory import estimate_parts, parts_at_peak

    parts = parts_at_peak(estimate_parts(parse_memory_plan(flags.split(), environment={})))
    return sum(each.gpu for each in parts if part in ("", each.name)) / GIB


def bloom(size: str, flags: str = "") -> float:
    return gib(f"--model_name bigscience/bloom-{size} {flags}")


def activations_of_attention() -> None:
    flags = "--bf16 --loss chunked --max_length {} --attention {}"
    kinds = ("eager", "sdpa")
    rows = [[f"{n:,}", *(f"{gib(flags.format(n, kind), 'activations'):.2f}" for kind in kinds)] for n in (512, 2048)]
    heads = ["Tokens: predicted activations (bf16, micro batch 4, chunked loss)", *(f"{kind}, GiB" for kind in kinds)]
    show_table(heads, rows)


def lora_held() -> None:
    show(load("docs/figures/adapters.py").held_table())


def lora_sent() -> None:
    """Print what a rank sends in a step with and without LoRA: bloom-7b1 in bf16 on 4 GPUs."""
    from estimate.command_line import parse_plan
    from estimate.communication import sent_bytes
    from estimate.model_shape import trace_shape

    still_sent = {
        "DDP": "gradients of the adapters",
        "ZeRO-1": "gradients and parameters of the adapters",
        "ZeRO-2": "the same, with the gradients in each micro batch",
        "ZeRO-3": "frozen weights, for each pass of each micro batch",
        "FSDP FULL_SHARD": "the same",
    }
    flags = {f"ZeRO-{stage}": f"--deepspeed ds_configs/zero{stage}.json" for stage in (1, 2, 3)}
    flags |= {"DDP": "", "FSDP FULL_SHARD": "--fsdp"}
    with_lora = load("docs/figures/adapters.py").sent_with_lora()
    rows = []
    for method, what in still_sent.items():
        words = f"--model_name bigscience/bloom-7b1 --bf16 --gpus 4 {flags[method]}".split()
        settings = parse_plan(words, environment={})
        full, lora = sent_bytes(trace_shape(settings), settings) / GB, with_lora[method] / GB
        rows.append([method, f"{full:.1f}", f"{lora:.2f}" if lora < 1 else f"{lora:.0f}", what])
    show_table(["GB per step", "Full", "LoRA", "What LoRA still sends"], rows)


def dimensions(which: str) -> None:
    """Print a table of docs/figures/dimensions.py. which: dimensions, messages or lengths."""
    show(getattr(load("docs/figures/dimensions.py"), f"table_of_{which}")())


def at_scale() -> None:
    show(load("docs/figures/at_scale.py").page_table())
