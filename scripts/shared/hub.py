"""Loading from the Hugging Face Hub, with and without network."""

import os
import socket
import sys
from urllib.parse import urlparse

import datasets
import huggingface_hub.constants
from transformers.utils import logging

from shared.errors import WorkshopError

# Model files that a run reads. Files of other frameworks and PyTorch's older *.bin are left out
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]


def draw_bars_on_terminals_only() -> None:
    """Disable the libraries' progress bars in logs.

    Otherwise each state of a bar would be a line of the log, or the next output would follow on the bar's line.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        logging.disable_progress_bar()  # also disables huggingface_hub's bars


def offline_without_network() -> None:
    """Switch the Hugging Face libraries to their cache when the Hub cannot be reached.

    Compute nodes often have no network. Without this switch, the libraries retry for minutes before they use the cache.
    If a proxy or HF_HUB_OFFLINE is set, the user has already decided, and nothing changes.
    """
    if "HF_HUB_OFFLINE" in os.environ or "https_proxy" in os.environ or "HTTPS_PROXY" in os.environ:
        return
    address = urlparse(huggingface_hub.constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=3).close()
    except OSError:
        print(f"{address.hostname} cannot be reached: using only the local cache", flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


def loading_error(flag: str, name: str, error: Exception) -> WorkshopError:
    """Return a one-line error for a model, tokenizer or dataset that a library could not load.

    flag, name: the command-line flag and its value.
    """
    if "custom code" in str(error):
        what = f"{name} asks for code of its own, which is never run here"
        return WorkshopError(flag, what, "use a model that transformers has a class for")
    if huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError | ValueError) and not os.path.isdir(name):
        what = f"{name} is neither a local path nor in the cache, and there is no network"
        # prefetch.py has no flag for a tokenizer: --model_name also fetches it
        prefetch_flag = "--dataset" if flag == "--dataset" else "--model_name"
        command = f"python scripts/prefetch.py {prefetch_flag} {name}"
        return WorkshopError(
            flag, what, f"on a login node run: {command} (it takes --model_name and --dataset together)"
        )
    way_out = "correct the name, or give a local path with all its files"
    return WorkshopError(flag, f"{name} cannot be loaded ({short_reason(error)})", way_out)


def short_reason(error: Exception) -> str:
    """Return the first two lines of a library's error as one line. The first line is often only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
