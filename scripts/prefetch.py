"""Download a model and a data set for compute nodes without network access.

    python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad

Run the script on a machine with network access. It fills the Hugging Face cache (HF_HOME), which the compute nodes
share. Do not use `hf download` instead: it fetches the weights for every framework, and does not build the data set
tables that an offline run reads.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from shared.before_imports import variables_before_imports

os.environ.update(variables_before_imports())

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
        raise WorkshopError("prefetch.py", "nothing to download", "give --model_name, --dataset or both")
    if arguments.model_name not in (None, "", TINY_BLOOM) and not is_folder("--model_name", arguments.model_name):
        download("--model_name", arguments.model_name, download_model)
    if arguments.dataset and not is_local(arguments.dataset):
        download("--dataset", arguments.dataset, download_dataset)


def download(flag: str, name: str, download_function: Callable[[str], str]) -> None:
    """Download a model or data set, and print the summary that the function returns.

    Raises WorkshopError (exit code 3) if the download fails.
    """
    try:
        print(f"{name}: {download_function(name)}")
    except Exception as error:  # the Hub client raises exceptions of its own, of httpx, and OSError
        way_out = "check the name, and that this machine has network access"
        what = f"{name} cannot be downloaded ({short_reason(error):.200})"
        raise WorkshopError(flag, what, way_out, ENVIRONMENT) from error


def download_model(name: str) -> str:
    """Download a model, with its *.bin files only if it has no safetensors. Return its size and folder."""
    folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=MODEL_FILES))
    if not any(folder.glob("*.safetensors")):
        huggingface_hub.snapshot_download(name, allow_patterns="*.bin")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e9:.1f} GB in {folder}"


def download_dataset(name: str) -> str:
    """Download a data set and build its tables. Return the number of questions in each split."""
    return ", ".join(f"{len(part)} questions in {split}" for split, part in load_dataset(name).items())


if __name__ == "__main__":
    run_program(main)
