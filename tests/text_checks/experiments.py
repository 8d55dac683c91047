"""Check the form, the number of GPUs and the knobs (experiment_knobs.yaml) of each experiment's script."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import yaml

from config import KNOBS
from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, REPOSITORY
from job.directives import gpus_per_node, parse_count, read_directives
from text_checks.common import read, relative_name

TABLE = "tests/text_checks/experiment_knobs.yaml"
ROWS = yaml.safe_load((REPOSITORY / TABLE).read_text())
ORDER = {knob.variable: place for place, knob in enumerate(KNOBS)}
TEMPLATES = ("own-model/train", "own-model/chat")  # their users change each knob
NOT_TAUGHT = ("demo", "gpu-check", "own-model")  # experiments that no section of the workshop runs
FIXED = ("MODEL_NAME", "TENSOR_PARALLEL")  # these define an experiment, so no submission may change them
SETTING = re.compile(r'(?:: "\$\{(\w+):=(.*)\}"|export (\w+)=(\S+))(?: +#.*)?')
ANY_SETTING = re.compile(r'^(?:export |: "\$\{)?([A-Z][A-Z_0-9]+):?=.*', re.MULTILINE)
CONFIG_FLAGS = {"deepspeed", "fsdp", "fsdp_config"}
SITE_DIRECTIVES = {"account", "partition", "reservation", "constraint", "chdir"}
# Number of questions in a step. It is the same for all folders that match a pattern, and so for any number of GPUs
GLOBAL_BATCHES = {
    "ddp/*": 16,
    "demo/*": 16,
    "custom-model/weak_scaling/*": 16,
    "tensor-parallel/*": 4,
    "batch-size/16": 16,
    "batch-size/64*": 64,
    "batch-size/256*": 256,
}
NUMBERS = {
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "twelve": 12,
    "sixteen": 16,
}
COUNT = re.compile(rf"\b(\d+|{'|'.join(NUMBERS)}) (GPU|node|rank)s?\b( each| of a node| per node)?", re.IGNORECASE)


def findings() -> Iterator[str]:
    for script in EXPERIMENT_SCRIPTS:
        yield from script_body(script)
        yield from directives(script)
        yield from first_comment(script)
        if trains(script) and experiment_folder(script) not in TEMPLATES:
            yield from knobs(script.with_name("env_vars.sh"))
            yield from global_batch(script)
    for row in ROWS:
        if not any(fnmatch(experiment_folder(script), row) for script in EXPERIMENT_SCRIPTS):
            yield f"{TABLE}: says {row}, experiments/ has no such folder"
    yield from index()


def index() -> Iterator[str]:
    """Check that the index has a sentence of its own for each experiment, and a section teaches it."""
    rows = dict(re.findall(r"submit\.sh (\S+)` \| (.+?)(?: It needs a GPU\.)? \|", read("experiments/README.md")))
    agendas = yaml.safe_load(read("experiments/agendas.yaml"))["sections"].values()
    taught = [family for group in agendas for entry in group.values() for family in entry.get("teaches", [])]
    for folder in map(experiment_folder, EXPERIMENT_SCRIPTS):
        if folder not in rows:
            remedy = "run make pages; if the row is still missing, name its family in a block"
            yield f"experiments/README.md: has no row for {folder}; {remedy}"
        elif not rows[folder].endswith(".") or [*rows.values()].count(rows[folder]) > 1:
            remedy = "begin its script's comment with a line of its own that ends with a full stop"
            yield f"experiments/README.md: describes {folder} by `{rows[folder]}`; {remedy}"
        if folder.split("/")[0] not in (*NOT_TAUGHT, *(family.split("/")[0] for family in taught)):
            yield f"experiments/agendas.yaml: no section teaches {folder}; write its family below a page's teaches"


def experiment_folder(script: Path) -> str:
    return str(script.parent.relative_to(EXPERIMENTS))


def trains(script: Path) -> bool:
    return "/train.py" in script.read_text()


def nodes_and_gpus(script: Path) -> tuple[int, int]:
    """Number of nodes, and number of GPUs on all nodes."""
    asked = read_directives(script)
    nodes = parse_count(asked.get("nodes", ""))
    return nodes, nodes * gpus_per_node(asked)


def script_body(script: Path) -> Iterator[str]:
    """Check the lines below the directives: job.sh, env_vars.sh, the bandwidth test, one command."""
    name, text = relative_name(script), script.read_text()
    # Slurm runs a copy of the script, but starts it in the submit directory, so the path is relative to the folder
    lines = ["set -e", f"source {'../' * len(script.parent.relative_to(EXPERIMENTS).parts)}job.sh"]
    if trains(script):
        lines.append('source "$ROOT/$EXPERIMENT/env_vars.sh"')
    for line in lines:
        if line not in text.splitlines():
            yield f"{name}: has no line {line}; add it"
    for setting in ANY_SETTING.finditer(text):
        if setting[1] in ORDER:
            yield f'{name}: says {setting[0]}, a knob is set in env_vars.sh; write : "${{{setting[1]}:=...}}" there'
    training = text.rstrip().splitlines()[-1]
    flags = set(re.findall(r"--([\w-]+)", training)) - CONFIG_FLAGS
    if flags:  # a flag would override the variable that a user gives at submission
        yield f"{name}: says --{' --'.join(sorted(flags))}, a knob is a variable of env_vars.sh"
    if not re.fullmatch(r'run_(python|torchrun|srun) "\$ROOT/scripts/\w+\.py" .*"\$@"', training):
        yield f'{name}: says {training}, a script ends with run_torchrun "$ROOT/scripts/train.py" "$@"'
    several = nodes_and_gpus(script)[0] > 1
    if several and "\ncheck_bandwidth\n" not in text:
        yield f"{name}: has no check_bandwidth; a script of several nodes calls it before its training"
    if not several and "\ncheck_bandwidth\n" in text:
        yield f"{name}: says check_bandwidth, only a script of several nodes calls it; remove the line"


def directives(script: Path) -> Iterator[str]:
    """Compare the directives with the names of folder and script, and find directives that belong to the site."""
    name, asked = relative_name(script), read_directives(script)
    stated = dict(zip(("nodes", "gpus"), nodes_and_gpus(script), strict=True))
    for part in script.relative_to(EXPERIMENTS).parts:
        for number, unit in re.findall(r"(?:^|_)(\d+)_(gpus|nodes)(?=[_.]|$)", part):
            if int(number) != stated[unit]:
                yield f"{name}: says {number} {unit} in the name {part}, its directives say {stated[unit]}"
    others = [other for other in EXPERIMENT_SCRIPTS if read_directives(other).get("job-name") == asked.get("job-name")]
    if len(others) > 1:
        both = " and ".join(map(relative_name, others))
        yield f"{name}: says --job-name={asked.get('job-name')}, which {both} share; give each job its own name"
    if f"sbatch {script.name}" not in script.read_text():
        yield f"{name}: says another command in its first comment, its name says #     sbatch {script.name}"
    if asked.get("output") != "log/%x_%j.out":
        yield f"{name}: says --output={asked.get('output')}, an experiment says --output=log/%x_%j.out"
    for directive in sorted({"nodes", "gpus-per-node", "mem", "time"} - asked.keys()):
        yield f"{name}: has no --{directive}, an experiment says #SBATCH --{directive}=..."
    for directive in sorted(asked.keys() & SITE_DIRECTIVES):
        yield f"{name}: says --{directive}, experiments/sites/example.sh says that a site sets it; remove it"


def first_comment(script: Path) -> Iterator[str]:
    """Compare the numbers of GPUs, nodes, ranks and questions, in words or digits, with the directives."""
    name, comment = relative_name(script), script.read_text().partition("#     sbatch")[0]
    nodes, gpus = nodes_and_gpus(script)
    for found in COUNT.finditer(comment):
        number, unit, of_a_node = found.groups()
        stated = nodes if unit == "node" else gpus // nodes if of_a_node else gpus
        if (NUMBERS.get(number.lower()) or int(number)) != stated:
            yield f"{name}: says {found[0]} in its first comment, its directives say {stated}"
    for each, total in re.findall(r"(\d+) questions per GPU, (\d+) in all", comment):
        if int(each) * gpus != int(total):
            yield f"{name}: says {total} in all in its first comment, {each} on {gpus} GPU(s) says {int(each) * gpus}"


def knobs(path: Path) -> Iterator[str]:
    """Compare the knobs of a folder with its row of the table, and their order with config.py."""
    name, folder = relative_name(path), str(path.parent.relative_to(EXPERIMENTS))
    row = next((row for row in ROWS if fnmatch(folder, row)), None)
    if not path.exists():
        yield f"{name}: does not exist, {TABLE} says {ROWS.get(row)}"
        return
    settings = []
    for line in path.read_text().splitlines():
        knob, value = parse_setting(line)
        if knob in ORDER:
            settings.append((knob, value))
        elif line and not line.startswith("#"):
            form = f': "${{NAME:=value}}" ({" and ".join(FIXED)}: export NAME=value)'
            yield f"{name}: says {line}, each line sets a knob of config.py by {form}"
    if row is None:
        line = f"{folder}: {' '.join(map('='.join, settings))}"
        yield f"{TABLE}: has no row for {folder}, {name} says {line}; write this line"
        return
    stated = dict(word.partition("=")[::2] for word in ROWS[row].split())
    shown = {knob: value if stated.get(knob, value) else "" for knob, value in settings}
    for knob in sorted(stated.keys() | shown.keys()):
        if stated.get(knob) != shown.get(knob):
            says, should_say = (
                f"{knob}={each[knob]}".rstrip("=") if knob in each else f"nothing about {knob}"
                for each in (shown, stated)
            )
            yield f"{name}: says {says}, {TABLE} says {should_say}"
    names = [knob for knob, _ in settings]
    if names != sorted(shown, key=ORDER.get):
        yield f"{name}: says {' '.join(names)}, config.py says {' '.join(sorted(shown, key=ORDER.get))}"


def parse_setting(line: str) -> tuple[str, str]:
    """Return the knob that a line of env_vars.sh sets, and its default value. Both are empty if it sets none."""
    found = SETTING.fullmatch(line)
    knob, value = (found[1] or found[3], found[2] or found[4]) if found else ("", "")
    if found and (knob in FIXED) != line.startswith("export"):
        return "", ""
    return knob, re.sub(r"\$\{SITE_\w+:-(.*)\}", r"\1", value)


def global_batch(script: Path) -> Iterator[str]:
    """Check the global batch: micro batch x accumulation x groups of ranks that compute different questions."""
    path = script.with_name("env_vars.sh")
    settings = {knob.variable: knob.default for knob in KNOBS}
    settings |= dict(map(parse_setting, path.read_text().splitlines() if path.exists() else []))
    for folders, stated in GLOBAL_BATCHES.items():
        if fnmatch(experiment_folder(script), folders):
            groups = nodes_and_gpus(script)[1] // int(settings["TENSOR_PARALLEL"])
            size = int(settings["BATCH_SIZE"]) * int(settings["GRAD_ACC"]) * groups
            if size != stated:
                says = f"{settings['BATCH_SIZE']} x {settings['GRAD_ACC']} x {groups} = {size} questions in a step"
                remedy = f"change BATCH_SIZE or GRAD_ACC, and the row of {experiment_folder(script)} in {TABLE}"
                yield f"{relative_name(path)}: says {says}, all of {folders} say {stated}; {remedy}"
