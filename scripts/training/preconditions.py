"""Checks of a training that need its model's shape: they run before the model is loaded and anything is written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
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

from distributed.fsdp_config import check_wrap_classes
from distributed.tensor_parallel import check_can_be_cut
from evaluate import load_metric
from model import check_model
from settings.command_line import Options
from shared.errors import WorkshopError
from training.chunked_loss import check_head
from training.compiling import check_torch_compile

# A data loader's worker listens at <temporary folder>/pymp-12345678/listener-12345678. Linux allows 107 bytes
LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-12345678/listener-12345678")


def check_trainable(
    options: Options, args: TrainingArguments, meta_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises WorkshopError (exit code 2) for a model that cannot be trained as the options say.

    meta_model: the model without memory for its weights.
    """
    values = options.values
    check_model(meta_model, tokenizer, values["max_length"])
    if values["loss"] == "chunked":
        check_head(meta_model)
    if values["activation_checkpointing"] and not meta_model.supports_gradient_checkpointing:
        what = f"{type(meta_model).__name__} cannot compute its blocks again"
        raise WorkshopError("--activation_checkpointing", what, "leave it out, or use FSDP's, in its config file")
    if options.fsdp_config is not None:
        check_wrap_classes(options.fsdp_config, values["fsdp_config"], meta_model)
    if values["tensor_parallel"] > 1:
        check_can_be_cut(meta_model, values["tensor_parallel"])
    if values["em_f1"]:
        load_metric()  # if it is missing, the run ends now and not after the training
    if args.torch_compile:
        check_torch_compile(args)
    check_temporary_folder(args)
    check_trainer_values(options, args, meta_model)


def check_temporary_folder(args: TrainingArguments) -> None:
    """Raises WorkshopError (exit code 2) if workers of the data loader could not send batches: the run would hang."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if args.dataloader_num_workers and length > LONGEST_TEMPORARY_FOLDER:
        what = f"{folder} has {length} characters, and DATA_WORKERS needs at most {LONGEST_TEMPORARY_FOLDER}"
        raise WorkshopError("TMPDIR", what, "set it to a shorter one, such as /tmp, or set DATA_WORKERS=0")


def check_trainer_values(options: Options, args: TrainingArguments, model: PreTrainedModel) -> None:
    """Raises WorkshopError (exit code 2) for values that the Trainer would refuse after the run record has begun."""
    if args.metric_for_best_model is None and args.save_strategy == "best":
        raise options.error("save_strategy", "best needs a metric to compare", "add --metric_for_best_model eval_loss")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise options.error("use_liger_kernel", "liger-kernel is not installed", "pip install liger-kernel")
    with refusal_of(options, "seed"):
        set_seed(args.seed)
    with refusal_of(options, "optim", "adam_", "weight_decay"):
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if {"params", "model", "optimizer_dict"} & settings.keys() or not isinstance(kind, type):
            return  # an optimizer that is made for this model's layers, such as GaLore
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": args.weight_decay}
        optimizer = kind([group], **settings)
    with refusal_of(options, "lr_scheduler", "warmup"):
        arguments: Any = args.lr_scheduler_kwargs
        steps = 100  # any number: the schedule is not used
        warmup = args.get_warmup_steps(steps)
        get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=arguments)


@contextlib.contextmanager
def refusal_of(options: Options, *beginnings: str) -> Iterator[None]:
    """Turn whatever a library raises into one line in its words, which names the given flags that begin like this."""
    try:
        yield
    except Exception as error:
        given = [name for flag, name in options.names.items() if flag.startswith(beginnings)]
        source = ", ".join(given) or "command line"
        raise WorkshopError(source, str(error), "give another value, or leave it out") from error
