"""A checkpoint is data: no file of it runs code when it is loaded.

torch.save writes a pickle, and a pickle may call any function there is. The Trainer loads its own files by PyTorch's
`weights_only`, which accepts tensors, plain values and a list of classes. DeepSpeed loads its files without it, and
here with it all the same. (The `.metadata` of a sharded FSDP checkpoint is a pickle that PyTorch reads by itself: see
SECURITY.md.)
"""

import os
from pathlib import Path

from torch.serialization import add_safe_globals, get_unsafe_globals_in_checkpoint
from transformers.trainer_pt_utils import safe_globals

from shared.errors import NO_CHECKPOINT, WorkshopError

TORCH_FILES = {".pt", ".pth", ".bin"}
NEVER_LOADED = "training_args.bin"  # the Trainer writes it for people, and holds classes of many modules


def forbid_code_in_checkpoints(with_deepspeed: bool) -> None:
    """From here on this process loads tensors, plain values and the classes that a checkpoint holds, nothing else.

    Whatever the caller of torch.load asks for: the variable goes before its `weights_only=False`.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # PyTorch refuses to load anything under both
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if with_deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_code_in(checkpoint: str | Path) -> None:
    """Raises WorkshopError (exit code 4), with the file's name, when one holds what would not be loaded.

    To be called after `forbid_code_in_checkpoints`. It reads no tensor.
    """
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.suffix not in TORCH_FILES or path.name == NEVER_LOADED:
            continue
        try:
            with safe_globals():  # numpy's, with which the Trainer loads the random states
                foreign = get_unsafe_globals_in_checkpoint(path)
            what = f"holds {min(foreign)}, which is code and no data" if foreign else ""
        except Exception as error:  # a damaged pickle raises anything
            what = f"is damaged, or no file of a checkpoint ({type(error).__name__})"
        if what:
            way_out = "resume from a checkpoint that your own run has written"
            raise WorkshopError(path, what, way_out, NO_CHECKPOINT)
