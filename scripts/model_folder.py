"""The folder of a saved model: which of its files is wrong, and how, found before anything is loaded or written."""

import os
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from errors import WorkshopError
from json_files import read_json

SAVED = "give the folder of a saved model"
AGAIN = "copy or download it again"
# where transformers looks for weights, in its order
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# what a tokenizer can be made of
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
# what safetensors says of a file that ends too early
CUT_OFF = ("header too small", "invalid header length", "incomplete metadata")


def folder_of(flag: str, name: str) -> Path | None:
    """The folder that a model's or tokenizer's name stands for, None for a name of the Hub.

    Raises WorkshopError (exit code 2) for a name that can only be a folder when there is none, and for a pipe in it.
    """
    if os.path.isdir(name):
        try:
            for path in Path(name).iterdir():
                if path.exists() and not path.is_file() and not path.is_dir():
                    raise WorkshopError(path, "is no regular file", "remove it")  # reading a pipe would not end
        except OSError as error:
            raise WorkshopError(name, error.strerror or "cannot be read", SAVED) from error
        return Path(name)
    if name.startswith((".", "/", "~")):
        raise WorkshopError(flag, f"there is no folder {name}", f"{SAVED}, or a Hub name")
    return None


def check_config(flag: str, folder: Path) -> None:
    """Raises WorkshopError (exit code 2) unless config.json names a kind of model that transformers has."""
    path = folder / "config.json"
    if not path.exists():
        raise WorkshopError(flag, f"the folder {folder} holds no config.json", SAVED)
    config = read_json(path, SAVED)
    kind = config.get("model_type")
    if config.get("auto_map") and kind not in CONFIG_MAPPING:  # with a class of transformers' own, that is taken
        what = "asks for code of the folder, which is never run here"
        raise WorkshopError(f"{path}: auto_map", what, "take a model that transformers has a class for")
    if kind is None:
        raise WorkshopError(f"{path}: model_type", "is missing", SAVED)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise WorkshopError(f"{path}: model_type", f"is {kind!r:.60}, which transformers does not know", SAVED)
    if config.get("quantization_config"):
        what = "the weights are quantised, and cannot be trained"
        raise WorkshopError(f"{path}: quantization_config", what, "take the model that they were made of")


def reason_of(error: Exception) -> str:
    """What a library says of a file, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


# Weights


def check_weights(folder: Path, model: PreTrainedModel) -> None:
    """Read of all weights names and shapes, no more, and compare them with those of the model.

    model: as its config describes it, on the device "meta". Raises WorkshopError (exit code 2) with the file at fault.
    transformers would give random values to a weight that is missing, and a warning that is easily missed.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    changes = get_model_conversion_mapping(model)
    renamed = [change for change in changes if isinstance(change, WeightRenaming)]
    merged = [change for change in changes if isinstance(change, WeightConverter)]
    found = set()
    for path in weight_files(folder):
        for saved_as, shape in shapes(path).items():
            name, merged_by = rename_source_key(saved_as, renamed, merged, model.base_model_prefix, wanted)
            if merged_by:
                return  # several tensors become one: only transformers can tell its shape
            if name in wanted and shape != wanted[name]:
                what = f"{saved_as} is {in_words(shape)}, config.json makes it {in_words(wanted[name])}"
                raise WorkshopError(path, what, "use weights and config.json of one model")
            found.add(name)
    check_all_there(folder, model, found)


def check_all_there(folder: Path, model: PreTrainedModel, found: set[str]) -> None:
    names_of: dict[int, list[str]] = {}  # tied weights have several, and are saved once
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    missing = [names[0] for names in names_of.values() if found.isdisjoint(names)]
    if missing:
        what = f"holds {len(names_of) - len(missing)} of the {len(names_of)} weights that config.json asks for"
        raise WorkshopError(weights_of(folder), f"{what}, not {missing[0]}", "use weights and config.json of one model")


def weights_of(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise WorkshopError(folder, f"holds no weights ({WEIGHTS[0]})", SAVED)


def weight_files(folder: Path) -> list[Path]:
    """The file of the weights, or all those that its index names."""
    index = weights_of(folder)
    if index.suffix != ".json":
        return [index]
    files = read_json(index, AGAIN).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise WorkshopError(f"{index}: weight_map", "is missing, or names no file", AGAIN)
    for name in files.values():
        if not isinstance(name, str) or name != os.path.basename(name):
            raise WorkshopError(f"{index}: weight_map", f"{name!r:.60} is no file of this folder", AGAIN)
        if not (folder / name).is_file():
            raise WorkshopError(folder / name, "is missing, though the index beside it names it", AGAIN)
    return [folder / name for name in sorted(set(files.values()))]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a file. Raises WorkshopError (exit code 2) for one cut off or foreign."""
    try:
        with path.open("rb") as file:
            start = file.read(40)
        if start.startswith(b"version https://git-lfs"):
            raise WorkshopError(path, "is a pointer of Git LFS, not the weights", "run git lfs pull in its folder")
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        if not zipfile.is_zipfile(path):
            raise WorkshopError(path, "is cut off, or was not written by torch.save", AGAIN)
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", AGAIN) from error
    except SafetensorError as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        cut = any(words in said for words in CUT_OFF)
        what = f"is cut off at {path.stat().st_size} bytes" if cut else "is no safetensors file"
        raise WorkshopError(path, f"{what} ({said})", AGAIN) from error
    except (pickle.UnpicklingError, RuntimeError, AttributeError, EOFError) as error:
        raise WorkshopError(path, "holds other things than tensors, which are never loaded", AGAIN) from error


def in_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


# Tokenizer


def check_tokenizer(folder: Path) -> None:
    """Raises WorkshopError (exit code 2) for a folder without a tokenizer, or with settings that cannot be read."""
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        read_json(settings, AGAIN)
    if not any(path.is_file() for name in VOCABULARIES for path in folder.glob(name)):
        what = "holds no tokenizer (tokenizer.json)"
        raise WorkshopError(folder, what, "save one beside the model, or give --tokenizer_name")


def broken_tokenizer(folder: Path, error: Exception) -> WorkshopError:
    """The error of a tokenizer that cannot be loaded, by the file that is at fault."""
    for path in sorted(folder.glob("*.json")):
        if path.name == "tokenizer.json":
            try:
                Tokenizer.from_file(str(path))
            except Exception as refused:  # the library raises nothing else
                return WorkshopError(path, f"is cut off or no tokenizer ({refused})", AGAIN)
        elif path.name in ("special_tokens_map.json", "added_tokens.json", "vocab.json"):
            try:
                read_json(path, AGAIN)
            except WorkshopError as refused:
                return refused
    return WorkshopError(folder, f"its tokenizer cannot be loaded ({reason_of(error)})", AGAIN)
