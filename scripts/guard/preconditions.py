"""Checks of a training run that need the shape of its model, before any weights are loaded or files are written."""

import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from distributed import watchdog
from distributed.collectives import print_once, rank
from distributed.fsdp_config import check_wrap_classes
from distributed.strategy import ZERO, Strategy
from distributed.tensor_parallel import check_tensor_parallel_model
from guard.checkpoints import complete_checkpoints
from measure.flops import other_matrices, tokens_in_sight
from model import check_model, count_parameters
from models.bloom_sdpa import attention_name
from models.chunked_loss import check_head
from models.lora import LoraLinear
from models.padding_free import check_padding_free
from settings.optimizers import ADAMW, choose_optimizer
from settings.settings import Settings
from shared.errors import ENVIRONMENT, WorkshopError
from shared.hub import file_system_errors, short_reason

# A data loader's worker opens the socket <temporary folder>/pymp-12345678/listener-12345678. Linux allows 107 bytes
LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
# Graphs of one function, after which torch.compile leaves the function as it is. By default it has 8. An epoch without
# padding has up to 19 pairs of lengths (data_loader.py), each with a graph if ACCELERATE_DYNAMO_USE_DYNAMIC is False
RECOMPILE_LIMIT = 64


# 1. The model and its settings


def check_trainable(
    settings: Settings, args: TrainingArguments, meta_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise WorkshopError (exit code 2) if the model cannot be trained with these settings.

    meta_model: the model without memory for its weights.
    """
    check_model(meta_model, tokenizer, settings.data.max_length)
    if settings.model.lora_rank:
        print_once(describe_adapters(meta_model, settings.model.lora_rank))
    if settings.model.loss == "chunked":
        check_head(meta_model)
    if settings.data.padding == "none":
        max_length = settings.data.max_length
        check_padding_free(
            meta_model, attention_name(meta_model), tokens_in_sight(meta_model, max_length) == max_length
        )
    if settings.trainer.activation_checkpointing and not meta_model.supports_gradient_checkpointing:
        what = f"{type(meta_model).__name__} cannot recompute its blocks"
        remedy = "leave it out, or set activation_checkpointing in an FSDP config file"
        raise WorkshopError("--activation_checkpointing", what, remedy)
    if settings.fsdp_config is not None:
        check_wrap_classes(settings.fsdp_config, settings.trainer.fsdp_config, meta_model)
    if settings.model.tensor_parallel > 1:
        check_tensor_parallel_model(meta_model, settings.model.tensor_parallel)
    if args.torch_compile:
        check_torch_compile(args)
    check_temporary_folder(args)


def describe_adapters(model: PreTrainedModel, rank: int) -> str:
    """Return lines for the log: layers with adapters, matrices without, and layers for which the rank is too large."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    text = f"LoRA: adapters on {last_names(layers)}"
    if others := other_matrices(model):
        text += f"; none on the {sum(map(torch.numel, others.values())):,} parameters of {last_names(others)}"
    if small := [name for name, layer in layers.items() if rank > min(layer.in_features, layer.out_features)]:
        text += f"\nLORA_RANK {rank} is larger than the smaller side of {last_names(small)}: less is enough there"
    return text


def last_names(names: Iterable[str]) -> str:
    """Return the last parts of the names of layers and weights, each once: "q_proj, v_proj"."""
    return ", ".join(dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names))


def check_saving(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model's small files into a temporary folder. Raise WorkshopError (exit code 2) if one cannot be saved.

    Without this check, the run would fail at its first checkpoint.
    """
    if rank() != 0:
        return
    with file_system_errors("TMPDIR"), tempfile.TemporaryDirectory() as folder:
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError:
            # Some models on the Hub set a temperature without do_sample. transformers reads such a file but rejects it
            # when it saves
            model.generation_config.do_sample = True
            print("generation_config.json sets options for sampling but not do_sample: saving it with do_sample=true")
        try:
            for each in (model.config, model.generation_config, tokenizer):
                each.save_pretrained(folder)
        except Exception as error:  # libraries raise many types of exception
            remedy = "correct the model's config.json, generation_config.json or tokenizer files"
            raise WorkshopError("--model_name", f"cannot be saved ({short_reason(error)})", remedy) from error


def check_torch_compile(args: Any) -> None:
    """Compile one function as a trial. Raise WorkshopError (exit code 3) if that fails.

    args: TrainingArguments, annotated as Any because mypy infers wrong types for backend and mode.
    """
    # With this variable, accelerate compiles one block and reuses it for all blocks of the same class. This saves
    # minutes, and the hooks of FSDP and DeepSpeed stay outside the compiled code
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    watchdog.progress("trying torch.compile")
    backend = args.torch_compile_backend
    trial = torch.compile(torch.sin, backend=backend, mode=args.torch_compile_mode)
    with file_system_errors("TORCHINDUCTOR_CACHE_DIR"):
        try:
            trial(torch.ones(2, device=args.device))
        except Exception as error:  # PyTorch, Triton and the compilers raise many types
            what = f"{backend} cannot compile on {socket.gethostname()} ({short_reason(error)})"
            raise WorkshopError("--torch_compile", what, "load a C++ compiler, or leave it out", ENVIRONMENT) from error


def check_temporary_folder(args: TrainingArguments) -> None:
    """Raise WorkshopError (exit code 2) if the path of the temporary folder is too long for the data loader's workers.

    Without this check the workers cannot send batches, and the run hangs.
    """
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if args.dataloader_num_workers and length > LONGEST_TEMPORARY_FOLDER:
        what = f"{folder} has {length} characters, and DATA_WORKERS needs at most {LONGEST_TEMPORARY_FOLDER}"
        raise WorkshopError("TMPDIR", what, "set it to a shorter path, such as /tmp, or set DATA_WORKERS=0")


# 2. Disk space for the checkpoints


def check_room(output_dir: str, settings: Settings, meta_model: PreTrainedModel, strategy: Strategy, keep: int) -> None:
    """Raise WorkshopError (exit code 3) if the disk has too little space for the checkpoints and the model.

    meta_model: the model without memory for its weights. keep: number of checkpoints to keep (--save_total_limit), 0
    for all. An older checkpoint is removed only when the new one is complete, so the disk briefly holds one more.
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
    reusable = len(complete_checkpoints([folder])[:keep]) * checkpoint  # new checkpoints replace the existing ones
    free = shutil.disk_usage(place).free + reusable
    if checkpoint * at_once + model > free:
        gib = 2**30
        what = (
            f"has {free / gib:.1f} GiB free, but needs {at_once} x {checkpoint / gib:.1f} GiB for checkpoints "
            f"and {model / gib:.1f} GiB for the model"
        )
        remedy = "free some space, give another --output_dir, or use --save_strategy no"
        raise WorkshopError(place, what, remedy, ENVIRONMENT)


def bytes_to_save(settings: Settings, meta_model: PreTrainedModel, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes of one checkpoint and of the final model. An unknown optimizer counts as AdamW.

    meta_model: the model with the adapters of LoRA, if there are any.
    """
    parameters = count_parameters(meta_model)
    trained = sum(parameter.numel() for parameter in meta_model.parameters() if parameter.requires_grad)
    frozen = parameters - trained
    in_16_bit = settings.precision != "fp32"
    assert strategy.checkpoint_bytes, f"{strategy.name} writes no checkpoints"
    checkpoint = strategy.checkpoint_bytes[in_16_bit] * trained
    checkpoint += (choose_optimizer(settings).state_bytes - ADAMW.state_bytes) * trained
    with_adapters = settings.model.lora_rank > 0  # without LoRA, a model may freeze some parameters by design
    weight = 2 if in_16_bit and (with_adapters or strategy in ZERO) else 4
    checkpoint += strategy.frozen_copies * weight * frozen
    tied_head = weight * (sum(saved.numel() for saved in meta_model.state_dict().values()) - parameters)
    model = weight * parameters + min(strategy.tied_heads, 1) * tied_head
    if with_adapters:
        model = 4 * (trained + settings.model.save_merged * frozen)  # the adapters, and the merged model, in fp32
    return checkpoint + strategy.tied_heads * tied_head, model
