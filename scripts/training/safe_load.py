"""A checkpoint is data: no file of it runs code when it is loaded.

torch.save writes a pickle, and a pickle may call any function there is. The Trainer loads its own files by PyTorch's
`weights_only`, which accepts tensors, plain values and a list of classes; DeepSpeed and torch.distributed.checkpoint
load theirs without. Here all of them are loaded so (`load_weights_only`), and looked through before, so that the line
of error names the file (`refuse_foreign_code`).
"""

import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.serialization import add_safe_globals, get_unsafe_globals_in_checkpoint
from transformers.trainer_pt_utils import safe_globals

from errors import NO_CHECKPOINT, WorkshopError
from parallel.distributed import rank

TORCH_FILES = {".pt", ".pth", ".bin"}
NEVER_LOADED = {"training_args.bin"}  # the Trainer writes it for people, and holds classes of many modules
METADATA = ".metadata"  # of a sharded FSDP checkpoint
WAY_OUT = "resume from a checkpoint that your own run has written"
# What torch.distributed.checkpoint writes into METADATA, besides dtypes
METADATA_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}


def load_weights_only(with_deepspeed: bool) -> None:
    """From here on this process loads tensors, plain values and the classes that a checkpoint holds, nothing else.

    Whatever the caller of torch.load asks for: the variable goes before its `weights_only=False`.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # PyTorch refuses to load anything under both
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    # torch.distributed.checkpoint knows no other way for METADATA, which is all that it takes pickle for there
    filesystem.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)  # type: ignore[assignment]
    if with_deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_foreign_code(checkpoint: Path) -> None:
    """Raises WorkshopError (exit code 4), with the file's name, when one holds what is not loaded as weights only.

    To be called after `load_weights_only`. It reads no tensor. Rank 0 looks; the others wait for it before they load.
    """
    if rank() != 0:
        return
    with safe_globals():  # numpy's, with which the Trainer loads the random states
        for path in sorted(checkpoint.rglob("*")):
            if path.name == METADATA:
                check_sharded(path)
            elif path.suffix in TORCH_FILES and path.name not in NEVER_LOADED:
                with error_of(path):
                    check_torch_file(path)


@contextmanager
def error_of(path: Path) -> Iterator[None]:
    """What is raised inside becomes the error of this file."""
    try:
        yield
    except OSError as error:
        raise WorkshopError(path, f"cannot be read ({error.strerror})", WAY_OUT, NO_CHECKPOINT) from error
    except Exception as error:  # a damaged pickle raises anything
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds {named[1]}, which is code and no data" if named else "is damaged, or no file of a checkpoint"
        raise WorkshopError(path, what, WAY_OUT, NO_CHECKPOINT) from error


def check_torch_file(file: Path | IO[bytes]) -> None:
    """Raises an exception that names a class or function of the file that is not allowed."""
    try:
        foreign = get_unsafe_globals_in_checkpoint(file)
    except ValueError:  # no zip file, but PyTorch's older format, which DeepSpeed can be told to write
        torch.load(file, weights_only=True, map_location="cpu")
        return
    if foreign:
        raise pickle.UnpicklingError(f"GLOBAL {min(foreign)}")


def check_sharded(metadata_file: Path) -> None:
    """METADATA, and the values in the files that it names; their tensors are loaded as weights only in any case."""
    with error_of(metadata_file), metadata_file.open("rb") as file:
        metadata = load_metadata(file)
        values = [
            (metadata_file.parent / stored.relative_path, stored.offset, stored.length)
            for index, stored in metadata.storage_data.items()
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
        ]
    for path, offset, length in values:
        with error_of(path), path.open("rb") as file:
            file.seek(offset)
            check_torch_file(io.BytesIO(file.read(length)))


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def load_metadata(file: IO[bytes]) -> Metadata:
    """pickle.load for METADATA. Raises UnpicklingError for anything else than what belongs there."""
    return MetadataUnpickler(file).load()
