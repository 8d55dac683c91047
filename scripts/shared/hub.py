"""Loading from the Hugging Face Hub, with and without network."""

import contextlib
import errno
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import datasets
import huggingface_hub.constants
import torch
from transformers.utils import logging

from shared.errors import ENVIRONMENT, WorkshopError
from shared.paths import REPOSITORY

# Problems of a file system, not of a file's content
UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
network_fault = "HF_HUB_OFFLINE is set"  # the reason to use only the cache; offline_without_network may change it
# Model files that a run reads. Files of other frameworks and PyTorch's older *.bin are left out
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]


def check_relative_path(flag: str, path: str) -> None:
    """Raise WorkshopError (exit code 2) for a path that exists in the repository, but not in the working directory.

    A job runs in its own folder. Without this check, a path that was right where the user typed it would be taken for a
    name on the Hub.
    """
    path = os.path.expanduser(path)
    there = REPOSITORY / path
    if there.exists() and not os.path.exists(path):
        raise WorkshopError(flag, f"there is no {path} in {os.getcwd()}", f"give an absolute path: {there}")


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
    If HF_HUB_OFFLINE is set, the user has already decided, and nothing changes.
    """
    global network_fault
    if "HF_HUB_OFFLINE" not in os.environ and (fault := find_network_fault()):
        print(f"{fault}: using only the local cache", flush=True)
        network_fault = fault
        os.environ["HF_HUB_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


def find_network_fault() -> str:
    """Try to connect to the Hub, or to its proxy. Return the fault, with the variable that holds the address, or ""."""
    hub = urlsplit(huggingface_hub.constants.ENDPOINT)
    proxies = [] if proxy_bypass(str(hub.hostname)) else [f"{hub.scheme}_proxy", "all_proxy"]
    variables = [*proxies, *map(str.upper, proxies), "HF_ENDPOINT"]
    variable = next(filter(os.environ.get, variables), "the Hub")
    address = os.environ.get(variable, hub.geturl())
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme.startswith("socks") and not find_spec("socksio"):
        return f"{variable} is a SOCKS proxy, for which the package socksio is not installed"
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 1080)
        socket.create_connection((parts.hostname, port), timeout=3).close()
    except (OSError, ValueError) as error:  # ValueError: the port is not a number
        return f"{parts.hostname} ({variable}) cannot be reached ({short_reason(error)})"
    return ""


@contextlib.contextmanager
def loading_errors(flag: str, name: str) -> Iterator[None]:
    """Turn any exception of a library that loads a model, tokenizer or dataset into one error line.

    flag, name: the command-line flag and its value.
    """
    try:
        yield
    except (WorkshopError, MemoryError, torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as error:  # libraries raise many types of exception for a broken file
        raise loading_error(flag, name, error) from error


def loading_error(flag: str, name: str, error: Exception) -> WorkshopError:
    if isinstance(error, pickle.UnpicklingError):
        what = f"a file of {name} contains objects other than tensors, which are never loaded"
        return WorkshopError(flag, what, "use a model saved as safetensors")
    if "custom code" in str(error):
        what = f"{name} asks for code of its own, which is never run here"
        return WorkshopError(flag, what, "use a model that transformers has a class for")
    cause = root_cause(error)
    outside = str(getattr(cause, "filename", None) or name)  # the path that failed: in the cache or below `name`
    if isinstance(cause, OSError) and (cause.errno in UNUSABLE or not outside.startswith(name)):
        way_out = "check its permissions and the space on its disk; HF_HOME sets another folder for the cache"
        return WorkshopError(outside, cause.strerror or str(cause), way_out, ENVIRONMENT)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError | ValueError)
    if offline and not os.path.exists(name):
        what = f"{name} is neither a local path nor in the cache, and there is no network: {network_fault}"
        # prefetch.py has no flag for a tokenizer: --model_name also fetches it
        prefetch_flag = "--dataset" if flag == "--dataset" else "--model_name"
        command = f"python scripts/prefetch.py {prefetch_flag} {name}"
        way_out = f"on a login node run: {command} (it takes --model_name and --dataset together)"
        return WorkshopError(flag, what, way_out, ENVIRONMENT)
    way_out = "correct the name, or give a local path with all its files"
    reason = short_reason(error)
    if cause is not error and short_reason(cause) not in reason:
        reason += f": {short_reason(cause)}"
    return WorkshopError(flag, f"{name} cannot be loaded ({reason})", way_out)


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception of a chain, which libraries wrap in a general one."""
    while error.__cause__:
        error = error.__cause__
    return error


def short_reason(error: BaseException) -> str:
    """Return the first two lines of a library's error as one line. The first line is often only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
