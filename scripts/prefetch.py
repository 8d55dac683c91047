"""Download a model and a data set on a machine with network, for compute nodes that have none.

    python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad

Fills the Hugging Face cache (HF_HOME, shared with the compute nodes). `hf download` would fetch every framework's copy
of the weights, and of a data set the files, without the tables that a run without network reads.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from datasets import load_dataset

from config import TINY_BLOOM
from data_loader import is_local
from model import is_folder
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.hub import MODEL_FILES, draw_bars_on_terminals_only, short_reason


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", "--model-name", help="Hub name of a causal LM")
    parser.add_argument("--dataset", help="Hub name of a SQuAD-like data set")
    arguments = parser.parse_args()
    if not arguments.model_name and not arguments.dataset:
        raise WorkshopError("prefetch.py", "nothing to fetch", "give --model_name, --dataset or both")
    if arguments.model_name not in (None, "", TINY_BLOOM) and not is_folder("--model_name", arguments.model_name):
        fetch("--model_name", arguments.model_name, model_files)
    if arguments.dataset and not is_local(arguments.dataset):
        fetch("--dataset", arguments.dataset, dataset_tables)


def fetch(flag: str, name: str, download: Callable[[str], str]) -> None:
    """Download it, and say what the cache holds of it now. Raises WorkshopError (exit code 3)."""
    try:
        print(f"{name}: {download(name)}")
    except Exception as error:  # the Hub client raises its own, httpx's and OSError
        way_out = "check the name, and that this machine has network"
        what = f"{name} cannot be fetched ({short_reason(error):.200})"
        raise WorkshopError(flag, what, way_out, ENVIRONMENT) from error


def model_files(name: str) -> str:
    """Download a model, and its *.bin only if it has no safetensors. Return its size and folder."""
    folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=MODEL_FILES))
    if not any(folder.glob("*.safetensors")):
        huggingface_hub.snapshot_download(name, allow_patterns="*.bin")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e9:.1f} GB in {folder}"


def dataset_tables(name: str) -> str:
    return ", ".join(f"{len(part)} questions to {split}" for split, part in load_dataset(name).items())


if __name__ == "__main__":
    run_program(main)
