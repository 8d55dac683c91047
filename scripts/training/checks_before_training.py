"""Checks of a training that need its model's shape: they run before the model is loaded and anything is written."""

import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.utils import is_liger_kernel_available

from distributed import watchdog
from distributed.collectives import rank
from distributed.fsdp_config import check_wrap_classes
from distributed.tensor_parallel import check_tensor_parallel_model
from model import check_model, count_parameters
from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError
from training.chunked_loss import check_head
from training.exact_match import load_metric
from training.find_checkpoints import complete_ones

# A data loader's worker listens at <temporary folder>/pymp-12345678/listener-12345678. Linux allows 107 bytes
LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
BYTES_OF_ADAM = 8  # two moments in fp32
# Bytes per parameter of a checkpoint with Adam: of a training in fp32, and in 16 bit
BYTES_OF_CHECKPOINT = {
    "plain": (12, 12),
    "DDP": (12, 12),
    "FSDP": (16, 16),  # the weights twice
    "DeepSpeed ZeRO-0": (16, 16),  # from here on the weights twice, in the precision; in 16 bit fp32 masters, too
    "DeepSpeed ZeRO-1": (20, 16),
    "DeepSpeed ZeRO-2": (20, 16),
    "DeepSpeed ZeRO-3": (16, 14),  # the weights once
}
# How often a checkpoint holds a head that is tied to the embedding in addition; the other strategies save it once
TIED_HEADS = {"FSDP": 2, "DeepSpeed ZeRO-0": 1, "DeepSpeed ZeRO-1": 1, "DeepSpeed ZeRO-2": 1}


# 1. The model, as the settings want to train it


def check_trainable(
    settings: Settings, args: TrainingArguments, meta_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises WorkshopError (exit code 2) for a model that cannot be trained as the settings say.

    meta_model: the model without memory for its weights.
    """
    check_model(meta_model, tokenizer, settings.data.max_length)
    if settings.model.loss == "chunked":
        check_head(meta_model)
    if settings.trainer.activation_checkpointing and not meta_model.supports_gradient_checkpointing:
        what = f"{type(meta_model).__name__} cannot compute its blocks again"
        raise WorkshopError("--activation_checkpointing", what, "leave it out, or use FSDP's, in its config file")
    if settings.fsdp_config is not None:
        check_wrap_classes(settings.fsdp_config, settings.trainer.fsdp_config, meta_model)
    if settings.model.tensor_parallel > 1:
        check_tensor_parallel_model(meta_model, settings.model.tensor_parallel)
    if settings.data.em_f1:
        load_metric()  # if it is missing, the run ends now and not after the training
    if args.torch_compile:
        check_torch_compile(args)
    check_temporary_folder(args)
    check_trainer_values(settings, args, meta_model)


def check_torch_compile(args: Any) -> None:
    """Compile one function as a trial. Raises WorkshopError (exit code 3) where that fails.

    args: TrainingArguments, whose backend and mode mypy takes for other types.
    """
    # accelerate then compiles one block for all of its kind. This takes minutes less, and the hooks of FSDP and
    # DeepSpeed stay outside
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    watchdog.progress("trying torch.compile")
    backend = args.torch_compile_backend
    trial = torch.compile(torch.sin, backend=backend, mode=args.torch_compile_mode)
    try:
        trial(torch.ones(2, device=args.device))
    except Exception as error:  # whatever PyTorch, Triton and the compilers end with
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{backend} cannot compile on {socket.gethostname()} ({reason})"
        raise WorkshopError("--torch_compile", what, "load a C++ compiler, or leave it out", ENVIRONMENT) from error


def check_temporary_folder(args: TrainingArguments) -> None:
    """Raises WorkshopError (exit code 2) if workers of the data loader could not send batches: the run would hang."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if args.dataloader_num_workers and length > LONGEST_TEMPORARY_FOLDER:
        what = f"{folder} has {length} characters, and DATA_WORKERS needs at most {LONGEST_TEMPORARY_FOLDER}"
        raise WorkshopError("TMPDIR", what, "set it to a shorter one, such as /tmp, or set DATA_WORKERS=0")


def check_trainer_values(settings: Settings, args: TrainingArguments, model: PreTrainedModel) -> None:
    """Raises WorkshopError (exit code 2) for values that the Trainer would refuse after the run record has begun."""
    if args.metric_for_best_model is None and args.save_strategy == "best":
        raise settings.error("save_strategy", "best needs a metric to compare", "add --metric_for_best_model eval_loss")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise settings.error("use_liger_kernel", "liger-kernel is not installed", "pip install liger-kernel")
    with refusal_of(settings, "seed"):
        set_seed(args.seed)
    with refusal_of(settings, "optim", "adam_", "weight_decay"):
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if {"params", "model", "optimizer_dict"} & arguments.keys() or not isinstance(kind, type):
            return  # an optimizer that is made for this model's layers, such as GaLore
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": args.weight_decay}
        optimizer = kind([group], **arguments)
    with refusal_of(settings, "lr_scheduler", "warmup"):
        scheduler_arguments: Any = args.lr_scheduler_kwargs
        # of any number of steps: the schedule is not used
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(100),
            num_training_steps=100,
            scheduler_specific_kwargs=scheduler_arguments,
        )


@contextlib.contextmanager
def refusal_of(settings: Settings, *beginnings: str) -> Iterator[None]:
    """Turn whatever a library raises into one line in its words, which names the given flags that begin like this."""
    try:
        yield
    except Exception as error:
        given = [name for flag, name in settings.names.items() if flag.startswith(beginnings)]
        source = ", ".join(given) or "command line"
        raise WorkshopError(source, str(error), "give another value, or leave it out") from error


# 2. Room for its checkpoints


def check_room(
    output_dir: str, settings: Settings, meta_model: PreTrainedModel, strategy: str, keep: int | None
) -> None:
    """Find out before the model is loaded whether the run can save. Raises WorkshopError (exit code 3).

    meta_model: the model without memory for its weights. keep: checkpoints that stay (--save_total_limit); the one
    before goes when the new one is complete.
    """
    if rank() != 0:
        return
    folder = Path(output_dir).absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise WorkshopError(place, "cannot be written", "give another --output_dir", ENVIRONMENT)
    trainer = settings.trainer
    if trainer.save_strategy == "no":
        return
    checkpoint, model = bytes_to_save(settings, meta_model, strategy)
    at_once = (keep or 1) + 1
    if trainer.save_strategy == "epoch" and trainer.max_steps < 0:
        at_once = min(at_once, math.ceil(trainer.num_train_epochs))
    there = len(complete_ones([folder])[:keep]) * checkpoint  # each goes when a new one is complete
    free = shutil.disk_usage(place).free + there
    if checkpoint * at_once + model > free:
        gib = 2**30
        what = (
            f"{free / gib:.1f} GiB free, {at_once} checkpoint(s) of {checkpoint / gib:.1f} GiB will be there at once, "
            f"and a model of {model / gib:.1f}"
        )
        raise WorkshopError(place, what, "free space, give another --output_dir, or --save_strategy no", ENVIRONMENT)


def bytes_to_save(settings: Settings, meta_model: PreTrainedModel, strategy: str) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the model at the end. Of optimizers, the state of Adam is known."""
    parameters = count_parameters(meta_model)
    in_16_bit = settings.precision != "fp32"
    kind = "FSDP" if strategy.startswith("FSDP") else strategy
    checkpoint = BYTES_OF_CHECKPOINT[kind][in_16_bit] * parameters
    if "adam" not in settings.trainer.optim:
        checkpoint -= BYTES_OF_ADAM * parameters
    weight = 2 if in_16_bit and kind.startswith("DeepSpeed") else 4
    tied_head = weight * (sum(saved.numel() for saved in meta_model.state_dict().values()) - parameters)
    heads = TIED_HEADS.get(kind, 0)
    return checkpoint + heads * tied_head, weight * parameters + min(heads, 1) * tied_head
