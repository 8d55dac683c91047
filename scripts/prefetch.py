"""Download a model and a data set on a machine with network, for compute nodes that have none.

    python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad

Fills the Hugging Face cache (HF_HOME, shared with the compute nodes) and notes what it holds in
$HF_HOME/workshop_manifest.json.
"""

import argparse
from pathlib import Path

import huggingface_hub
from datasets import load_dataset
from huggingface_hub.constants import HF_HOME

from data_loader import is_local
from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from hub import draw_bars_on_terminals_only, reason_of
from job.finish import now
from json_files import read_json, write_json
from model import TINY_BLOOM, is_folder

MANIFEST = Path(HF_HOME) / "workshop_manifest.json"
# Weights come as safetensors, or in older repositories as pytorch_model.bin; never other frameworks' copies
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", "--model-name", help="Hub name of a causal LM")
    parser.add_argument("--dataset", help="Hub name of a SQuAD-like data set")
    arguments = parser.parse_args()
    if not arguments.model_name and not arguments.dataset:
        raise WorkshopError("prefetch.py", "nothing to fetch", "give --model_name, --dataset or both")
    fetched: dict[str, dict] = {}
    if arguments.model_name:
        fetched |= fetch_model(arguments.model_name)
    if arguments.dataset:
        fetched |= fetch_dataset(arguments.dataset)
    manifest = read_json(MANIFEST, "remove it") if MANIFEST.exists() else {}
    MANIFEST.parent.mkdir(parents=True, exist_ok=True)
    write_json(MANIFEST, manifest | fetched)
    print(f"manifest: {MANIFEST}")


def fetch_model(name: str) -> dict:
    if name == TINY_BLOOM or is_folder("--model_name", name):
        print(f"{name}: local, nothing to fetch")
        return {}
    try:
        info = huggingface_hub.model_info(name)
        files = [sibling.rfilename for sibling in info.siblings or []]
        patterns = MODEL_FILES if any(f.endswith(".safetensors") for f in files) else [*MODEL_FILES, "*.bin"]
        # by its branch, not by info.sha: without network from_pretrained looks for refs/main
        folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
    except Exception as error:  # the Hub client raises its own, httpx's and OSError
        raise cannot_fetch("--model_name", name, error) from error
    size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    print(f"{name}: {size / 2**30:.2f} GiB in {folder}")
    return {f"model {name}": {"revision": Path(folder).name, "bytes": size, "fetched": now()}}


def fetch_dataset(name: str) -> dict:
    if is_local(name):
        print(f"{name}: local, nothing to fetch")
        return {}
    try:
        splits = load_dataset(name)
    except Exception as error:
        raise cannot_fetch("--dataset", name, error) from error
    rows = {split: len(part) for split, part in splits.items()}
    print(f"{name}: {rows}")
    return {f"dataset {name}": {"rows": rows, "fetched": now()}}


def cannot_fetch(flag: str, name: str, error: Exception) -> WorkshopError:
    way_out = "check the name, and that this machine has network"
    return WorkshopError(flag, f"{name} cannot be fetched ({reason_of(error):.200})", way_out, ENVIRONMENT)


if __name__ == "__main__":
    run_program(main)
