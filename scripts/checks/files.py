"""Checks of preflight.py: the cache of models and data sets."""

import argparse
import os
import shutil
from pathlib import Path

from checks.machine import Lines

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/localscratch", "/scratch/local")


def cache(arguments: argparse.Namespace) -> Lines:
    os.environ["HF_HUB_OFFLINE"] = "1"  # only what lies there counts
    from config import CUSTOM_GPT, TINY_BLOOM
    from data_loader import is_local

    models = [name for name in arguments.model_name if name not in (TINY_BLOOM, CUSTOM_GPT) and not Path(name).is_dir()]
    if not models and is_local(arguments.dataset):
        yield "skip", "cache", f"{', '.join(arguments.model_name)} and {Path(arguments.dataset).name} need none"
        return
    from datasets import load_dataset
    from huggingface_hub.constants import HF_HOME

    if not os.access(HF_HOME, os.W_OK):
        way_out = "create it, writable for all: runs put their tokenised data there"
        yield "warn", "HF_HOME", f"{HF_HOME} is not there, or cannot be written", way_out
    elif node_local(HF_HOME) and shutil.which("sbatch"):
        yield "warn", "HF_HOME", f"{HF_HOME} is of this node alone", "choose a file system that all nodes see"
    else:
        yield "ok", "HF_HOME", HF_HOME
    prefetch = f"HF_HOME={HF_HOME} python scripts/prefetch.py"
    for name in models:
        try:
            yield "ok", "model", f"{name}, {cached_size(name) / 1e9:.1f} GB"
        except (OSError, ValueError) as error:
            yield "fail", "model", f"{name}: {error}", f"{prefetch} --model_name {name}"
    if not is_local(arguments.dataset):
        try:
            rows = {split: len(part) for split, part in load_dataset(arguments.dataset).items()}
            yield "ok", "dataset", f"{arguments.dataset}, {rows}"
        except Exception:  # the Hub client raises its own, httpx's and OSError
            found = f"{arguments.dataset} is not in the cache"
            yield "fail", "dataset", found, f"{prefetch} --dataset {arguments.dataset}"


def cached_size(name: str) -> int:
    """Return the bytes of a model in the cache. Raises OSError if the model is missing or incomplete."""
    import huggingface_hub

    from shared.hub import MODEL_FILES

    folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True, allow_patterns=MODEL_FILES))
    files = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    if not any(name.endswith((".safetensors", ".bin")) for name in files):
        raise FileNotFoundError("its weights are not in the cache")
    return sum(files.values())


def node_local(path: str) -> bool:
    return any(Path(path).resolve().is_relative_to(folder) for folder in NODE_LOCAL)
