"""Checks of preflight.py: model cache, disk, config files and experiments."""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from checks.machine import Lines
from errors import WorkshopError
from paths import EXPERIMENTS, REPOSITORY

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/localscratch", "/scratch/local")
CHECKPOINT_BYTES = 12  # per parameter: fp32 weights and Adam's two moments
MODEL_BYTES = 4  # per parameter: fp32 weights


def cache(arguments: argparse.Namespace) -> Lines:
    os.environ["HF_HUB_OFFLINE"] = "1"  # only what lies there counts
    from data_loader import is_local
    from model import CUSTOM_GPT, TINY_BLOOM
    from prefetch import HF_HOME, MANIFEST

    hub = [name for name in arguments.model_name if name not in (TINY_BLOOM, CUSTOM_GPT) and not Path(name).is_dir()]
    if not hub and is_local(arguments.dataset):
        yield "skip", "cache", f"{', '.join(arguments.model_name)} and {Path(arguments.dataset).name} need none"
        return
    if not Path(HF_HOME).exists():
        yield "fail", "HF_HOME", f"{HF_HOME} does not exist", "create it, readable for all, then run prefetch.py"
    elif not os.access(HF_HOME, os.R_OK | os.X_OK):
        yield "fail", "HF_HOME", f"{HF_HOME} cannot be read", "set HF_HOME in the site file, then run prefetch.py"
    elif not os.access(HF_HOME, os.W_OK):
        yield "warn", "HF_HOME", f"{HF_HOME} cannot be written", "runs put their tokenised data there"
    elif node_local(HF_HOME) and shutil.which("sbatch"):
        yield "warn", "HF_HOME", f"{HF_HOME} is of this node alone", "choose a file system that all nodes see"
    else:
        yield "ok", "HF_HOME", HF_HOME
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.is_file() else {}
    for name in hub:
        found, missing = cached_model(name, manifest.get(f"model {name}", {}).get("bytes"))
        way_out = f"HF_HOME={HF_HOME} python scripts/prefetch.py --model_name {name}"
        yield ("fail", "model", f"{name}: {missing}", way_out) if missing else ("ok", "model", f"{name}, {found}")
    if not is_local(arguments.dataset):
        from datasets import load_dataset

        try:
            rows = {split: len(part) for split, part in load_dataset(arguments.dataset).items()}
            yield "ok", "dataset", f"{arguments.dataset}, {rows}"
        except Exception:  # the Hub client raises its own, httpx's and OSError
            way_out = f"HF_HOME={HF_HOME} python scripts/prefetch.py --dataset {arguments.dataset}"
            yield "fail", "dataset", f"{arguments.dataset} is not in the cache", way_out


def cached_model(name: str, expected: int | None) -> tuple[str, str]:
    """Size of a model in the cache, or what is missing; expected: bytes that prefetch.py noted."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return "", "not in the cache"
    files = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    needed = {"config.json"}
    for index in folder.glob("*.index.json"):
        needed |= {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {index.name}
    size = sum(files.values())
    # a file system that removes old files leaves links to nothing
    absent = sorted({*needed, *(str(f.relative_to(folder)) for f in folder.rglob("*") if not f.exists())} - {*files})
    if not any(f.endswith((".safetensors", ".bin")) for f in files):
        absent.append("weights")
    if absent:
        return "", f"the cache lacks {', '.join(absent)}"
    if expected and size < expected:
        return "", f"{size} of {expected} bytes are in the cache"
    return f"{size / 1e9:.1f} GB", ""


def node_local(path: str) -> bool:
    return any(Path(path).resolve().is_relative_to(folder) for folder in NODE_LOCAL)


def disk(arguments: argparse.Namespace) -> Lines:
    saving = {}
    for path in sorted(EXPERIMENTS.rglob("*.slurm")):
        try:
            size = parameters(path, arguments)
        except WorkshopError as error:  # a knob that only the job knows
            yield "warn", "disk", f"{error.source}: {error.what}", "what it saves is not counted here"
            continue
        if size:
            saving[path] = size
    free = shutil.disk_usage(EXPERIMENTS).free
    # a new checkpoint is complete before the old one goes
    need = sum(saving.values()) * (CHECKPOINT_BYTES + MODEL_BYTES) + max(saving.values(), default=0) * CHECKPOINT_BYTES
    names = ", ".join(str(path.parent.relative_to(EXPERIMENTS)) for path in saving)
    found = f"{free / 1e9:.1f} GB free, {need / 1e9:.1f} GB for one run each of {names or 'nothing that saves'}"
    way_out = "free some, or set SAVE_STRATEGY=no; a quota may be less still (quota -s)"
    yield ("ok", "disk", found) if free >= need else ("warn", "disk", found, way_out)


def parameters(script: Path, arguments: argparse.Namespace) -> int:
    """Parameters of the model that an experiment saves, 0 if it saves none."""
    from check_experiment import knobs_of

    knobs = knobs_of(script, os.environ)
    if knobs.get("SAVE_STRATEGY") == "no" or "/train.py" not in script.read_text(encoding="utf-8"):
        return 0
    from knobs import CUSTOM_SIZES, DEFAULTS
    from model import count_parameters, empty_model

    sizes = {flag: int(knobs.get(flag.upper()) or DEFAULTS[flag]) for flag in CUSTOM_SIZES}
    # the models of the command line take turns in an experiment that names none
    own = knobs.get("MODEL_NAME")
    names = arguments.model_name if own == os.environ.get("MODEL_NAME") else [own]
    data = SimpleNamespace(dataset=arguments.dataset)
    return max(count_parameters(empty_model(SimpleNamespace(model_name=name, **sizes), data)) for name in names)


def configs() -> Lines:
    from check_experiment import check_experiment

    from parallel.ds_config import check_ds_config
    from parallel.fsdp_config import check_fsdp_file

    def check_script(name: str) -> None:
        check_experiment(Path(name))

    kinds = [("ds_configs", "*.json", check_ds_config), ("fsdp_configs", "*.json", check_fsdp_file)]
    for folder, pattern, check in [*kinds, ("experiments", "**/*.slurm", check_script)]:
        files = sorted((REPOSITORY / folder).glob(pattern))
        wrong = [error for file in files if (error := refusal(check, str(file)))]
        if wrong:
            more = f"; and {len(wrong) - 1} more" if wrong[1:] else ""
            yield "fail", folder, f"{wrong[0]}{more}"
        else:
            yield "ok", folder, f"{len(files)} files"


def refusal(check: Callable, *arguments: object) -> WorkshopError | None:
    """The error that a check raises."""
    try:
        check(*arguments)
    except WorkshopError as error:
        return error
    return None
