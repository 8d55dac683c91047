"""Loading from the Hugging Face Hub, with and without network."""

import contextlib
import errno
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import datasets
import huggingface_hub.constants
import torch
from transformers.utils import logging

from shared.errors import ENVIRONMENT, WorkshopError, error_number, remedy_for_write
from shared.files import check_readable
from shared.paths import REPOSITORY

# Problems of a file system or of a process's limits, not of a file's content
UNUSABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EEXIST, errno.ENOTDIR),
    *(errno.EFBIG, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE),
}
network_fault = "HF_HUB_OFFLINE is set"  # the reason to use only the cache; offline_without_network may change it
# Model files that a run reads. Files of other frameworks and PyTorch's older *.bin are left out
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
CHECKPOINT_FILES = ["*.pt", "*.pth", "*.bin"]


def check_relative_path(flag: str, path: str) -> None:
    """Raise WorkshopError (exit code 2) for a path that exists in the repository, but not in the working directory.

    A job runs in its own folder. Without this check, a path that was right where the user typed it would be taken for a
    name on the Hub.
    """
    path = os.path.expanduser(path)
    there = REPOSITORY / path
    if os.path.exists(there) and not os.path.exists(path):
        raise WorkshopError(flag, f"there is no {path} in {os.getcwd()}", f"give an absolute path: {there}")


def check_files(folder: str) -> None:
    """Raise WorkshopError for a file of a model or checkpoint that is unreadable (code 3) or not the real file (2).

    The libraries would say that the file does not exist, or that its header is too large. A missing folder is not an
    error here.
    """
    check_readable(folder)
    for file in os.scandir(folder) if os.path.isdir(folder) else ():
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in (*MODEL_FILES, *CHECKPOINT_FILES)):
            check_readable(file.path)
            with open(file, "rb") as opened:
                if opened.read(100).startswith(b"version https://git-lfs"):
                    raise WorkshopError(file.path, "is a pointer of Git LFS, not the file itself", "run git lfs pull")


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
    proxies = [f"{hub.scheme}_proxy", f"{hub.scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"]
    variables = ["HF_ENDPOINT"] if proxy_bypass(str(hub.hostname)) else [*proxies, "HF_ENDPOINT"]
    variable = next(filter(os.environ.get, variables), "the Hub")
    value = os.environ.get(variable, hub.geturl())
    address = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = address.port or {"http": 80, "https": 443}.get(address.scheme, 1080)
        socket.create_connection((address.hostname, port), timeout=3).close()
    except (OSError, ValueError) as error:  # ValueError: the port is not a number
        return f"{address.hostname} ({variable}) cannot be reached ({short_reason(error)})"
    return ""


@contextlib.contextmanager
def file_system_errors(place: str = "") -> Iterator[None]:
    """Turn an exception that a file system has caused, directly or not, into one error line (exit code 3).

    place: what the line names if the exception names no file. The default is the cache of datasets.
    """
    try:
        yield
    except Exception as error:
        cause = chain_of_causes(error)[-1]
        number = error_number(cause)
        if number not in UNUSABLE:
            raise
        remedy = f"{remedy_for_write(cause)}; HF_HOME and TMPDIR set other folders"
        place = getattr(cause, "filename", None) or place or datasets.config.HF_DATASETS_CACHE
        raise WorkshopError(place, os.strerror(number), remedy, ENVIRONMENT) from error


@contextlib.contextmanager
def loading_errors(flag: str, name: str) -> Iterator[None]:
    """Turn any exception of a library that loads a model, tokenizer or dataset into one error line.

    flag, name: the command-line flag and its value.
    """
    try:
        with file_system_errors():
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
    causes = chain_of_causes(error)
    cause = causes[-1]
    offline = huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError | ValueError)
    if offline and not (os.path.isfile(name) or (os.path.isdir(name) and flag != "--dataset")):
        what = f"{name} is neither a local path nor in the cache, and there is no network: {network_fault}"
        # prefetch.py has no flag for a tokenizer: --model_name also fetches it
        prefetch_flag = "--dataset" if flag == "--dataset" else "--model_name"
        command = f"python scripts/prefetch.py {prefetch_flag} {name}"
        remedy = f"on a login node run: {command} (it takes --model_name and --dataset together)"
        return WorkshopError(flag, what, remedy, ENVIRONMENT)
    reason = short_reason(error)
    if cause is not error and short_reason(cause) not in reason:
        reason += f": {short_reason(cause)}"
    kinds = [kind.__name__ for each in causes for kind in type(each).__mro__]
    if "TransportError" in kinds:  # huggingface_hub uses httpx or httpx2, and both have this class
        remedy = "check HTTPS_PROXY, ALL_PROXY and HF_ENDPOINT"
        return WorkshopError(flag, f"{name} cannot be loaded from the Hub ({reason})", remedy, ENVIRONMENT)
    remedy = (
        "copy or download this file again"
        if os.path.isfile(name)
        else "correct the name, or give a local path with all its files"
    )
    return WorkshopError(flag, f"{name} cannot be loaded ({reason})", remedy)


def chain_of_causes(error: BaseException) -> list[BaseException]:
    """Return the exception and those that led to it. Libraries wrap the first exception in general ones."""
    causes: list[BaseException] = []
    following: BaseException | None = error
    while following and following not in causes:
        causes.append(following)
        hidden = following.__suppress_context__  # by `raise ... from None`
        following = following.__cause__ or (None if hidden else following.__context__)
    return causes


def short_reason(error: BaseException) -> str:
    """Return the first two lines of a library's error as one line. The first line is often only a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
