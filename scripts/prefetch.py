"""Download a model and a data set for compute nodes without network access.

    python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad

Run the script on a machine with network access. It fills the Hugging Face cache (HF_HOME), which the compute nodes
share. Do not use `hf download` instead: it fetches the weights for every framework, and does not build the data set
tables that an offline run reads.
"""

from pathlib import Path

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import huggingface_hub
from datasets import load_dataset

from config import TINY_BLOOM
from data_loader import find_files
from model import is_folder
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.hub import MODEL_FILES, draw_bars_on_terminals_only, find_network_fault, loading_errors


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__)
    parser.add_argument("--model_name", "--model-name", help="Hub name of a causal LM")
    parser.add_argument("--dataset", help="Hub name of a SQuAD-like data set")
    arguments = parser.parse_args()
    if not arguments.model_name and not arguments.dataset:
        raise WorkshopError("prefetch.py", "nothing to download", "give --model_name, --dataset or both")
    model = arguments.model_name not in (None, "", TINY_BLOOM) and not is_folder("--model_name", arguments.model_name)
    dataset = arguments.dataset and not find_files(arguments.dataset)
    if (model or dataset) and (fault := find_network_fault()):
        raise WorkshopError("network", fault, "run this on a machine that reaches the Hub", ENVIRONMENT)
    if model:
        with loading_errors("--model_name", arguments.model_name):
            print(f"{arguments.model_name}: {download_model(arguments.model_name)}")
    if dataset:
        with loading_errors("--dataset", arguments.dataset):
            parts = load_dataset(f"hf://datasets/{arguments.dataset}").items()  # this also builds the tables
            print(f"{arguments.dataset}: " + ", ".join(f"{len(part)} questions in {split}" for split, part in parts))


def download_model(name: str) -> str:
    """Download a model, with its *.bin files only if it has no safetensors. Return its size and folder."""
    folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=MODEL_FILES))
    if not any(folder.glob("*.safetensors")):
        huggingface_hub.snapshot_download(name, allow_patterns="*.bin")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e9:.1f} GB in {folder}"


if __name__ == "__main__":
    run_program(main)
