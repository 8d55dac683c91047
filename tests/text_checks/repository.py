"""The pins, the promised names, the version, the help of the scripts, and how a command ends."""

import ast
import json
import re
from collections.abc import Iterator

import yaml

from helpers import REPOSITORY
from names import PROMISED, names
from shared.paths import workshop_version
from text_checks.common import SCRIPTS, TREES, differences, name_of, read
from text_checks.imports import is_main_guard

STACK = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "torchmetrics", "psrecord"}
ENDS = {"run_program(main)", "run_and_exit(main)"}
# They have the standard library alone: one becomes another program, job.sh waits for the other
OTHER_ENDS = (SCRIPTS / "job" / "with_parent.py", SCRIPTS / "config.py")


def findings() -> Iterator[str]:
    yield from pins()
    yield from older_gpus()
    yield from promised_names()
    yield from version()
    yield from ends_of_commands()
    yield from files_that_a_help_names()
    if "experiments/wandb_key" not in read(".gitignore").splitlines():
        yield ".gitignore: does not list experiments/wandb_key, which holds a key; add this line"


def pins_of(lines: list[str]) -> dict[str, str]:
    words = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-r"))]
    return {name: pin for name, _, pin in (word.partition("==") for word in words)}


def pins() -> Iterator[str]:
    """pip and conda install the same version of each package."""
    requirements = pins_of(read("requirements.txt").splitlines())
    environment = yaml.safe_load(read("environment.yml"))
    (by_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    yield from differences("environment.yml", "requirements.txt", pins_of(by_pip), requirements)
    if environment["name"] != "deepspeed-finetune":
        yield f"environment.yml: says name {environment['name']}, the pages say deepspeed-finetune"
    for file in ("requirements.txt", "requirements-dev.txt"):
        for name, pin in pins_of(read(file).splitlines()).items():
            if not re.fullmatch(r"[\w.]+", pin) or not re.fullmatch(r"[\w.-]+", name):
                yield f"{file}: {name}: is not pinned; write <package>==<version>"
    for name in sorted(STACK - requirements.keys()):
        yield f"requirements.txt: does not install {name}; write {name}==<version>"


def older_gpus() -> Iterator[str]:
    """The build of PyTorch for older GPUs has the pinned version wherever a reader looks for it."""
    torch = pins_of(read("requirements.txt").splitlines())["torch"]
    command = f"python -m pip install torch=={torch}+cu126 --index-url https://download.pytorch.org/whl/cu126"
    pages = ("docs/environment.md", "docs/instructor/README.md", "experiments/sites/example.sh")
    for name in (*pages, "scripts/checks/machine.py"):
        if command not in read(name):
            yield f"{name}: does not say how to install torch {torch} for older GPUs; write `{command}`"


def promised_names() -> Iterator[str]:
    now = names()
    for kind, promised in json.loads(PROMISED.read_text()).items():
        for name in promised:
            if name not in now[kind]:
                way_out = "keep the name, or the next version is 2.0.0: docs/instructor/own-copy.md"
                yield f"{name_of(PROMISED)}: promises {name} ({kind}), which is gone; {way_out}"


def version() -> Iterator[str]:
    _to_come, latest, *_ = re.findall(r"^## (.*)", read("CHANGELOG.md"), re.MULTILINE)
    if not latest.startswith(f"{workshop_version()} ("):
        yield f"CHANGELOG.md: its second heading says {latest}, pyproject.toml says {workshop_version()}"


def ends_of_commands() -> Iterator[str]:
    """Each command turns a WorkshopError into one line and an exit code."""
    for path, tree in TREES.items():
        guards = [node for node in tree.body if is_main_guard(node)]
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body) != bool(guards):
            yield f'{name_of(path)}: has one of main() and `if __name__ == "__main__":`; write both, or none'
        for guard in guards:
            calls = [ast.unparse(node) for node in guard.body]
            if guard is not tree.body[-1]:
                yield f'{name_of(path)}: has code after `if __name__ == "__main__":`; move it above'
            if path not in OTHER_ENDS and not (len(calls) == 1 and calls[0] in ENDS):
                yield f"{name_of(path)}: ends with {'; '.join(calls)}; write run_program(main), of shared/errors.py"


def files_that_a_help_names() -> Iterator[str]:
    pattern = r"(?<!\S)((?:scripts|ds_configs|data|experiments|fsdp_configs)/[\w./-]+\.\w+)"
    for path, tree in TREES.items():
        for name in re.findall(pattern, ast.get_docstring(tree) or ""):
            if not (REPOSITORY / name).exists():
                yield f"{name_of(path)}: its help names {name}, which is not there; write the file's new name"
