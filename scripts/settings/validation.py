"""Check settings without a process group and without data. Each check raises WorkshopError (exit code 2)."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from config import CUSTOM_GPT, CUSTOM_SIZES, has_random_weights
from settings.hints import UNUSED_FLAGS
from settings.settings import Settings
from shared.json_files import LARGEST

ABOVE_ZERO = math.ulp(0)
# Flag -> the smallest number, and a limit that the number must stay below. Every other number is at least 0
LIMITS = {
    **dict.fromkeys(("train_size", "eval_size", "samples_per_gpu", "max_length", "em_f1_batch_size"), (1, LARGEST)),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, LARGEST)),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps"), (1, LARGEST)),
    **dict.fromkeys(("max_steps", "ddp_timeout", "tensor_parallel", *CUSTOM_SIZES, "gpus", "nodes"), (1, LARGEST)),
    # The flags *_steps may be a fraction of the training, such as 0.1
    **dict.fromkeys(("num_train_epochs", "logging_steps", "eval_steps", "save_steps"), (ABOVE_ZERO, LARGEST)),
    **dict.fromkeys(("learning_rate", "gpu_memory", "cpu_memory"), (ABOVE_ZERO, LARGEST)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1)),
    "save_total_limit": (-LARGEST, LARGEST),  # 0 or less: no limit
}
NO_LIMIT = {"max_steps": -1, "local_rank": -1}
LOWEST_USUAL_LORA_RATE = 1e-4


def check_settings(settings: Settings) -> None:
    check_numbers(settings)
    for flag in sorted(settings.names.keys() & UNUSED_FLAGS.keys()):
        raise settings.error(flag, "has no effect in this workshop", UNUSED_FLAGS[flag])
    for flag in sorted(settings.names.keys() & set(CUSTOM_SIZES)):
        if settings.model.model_name != CUSTOM_GPT:
            what = f"has no effect on {settings.model.model_name}"
            raise settings.error(flag, what, f"leave it out, or train {CUSTOM_GPT}")
    for applies, flag, what, remedy in contradictions(settings):
        if applies:
            raise settings.error(flag, what, remedy)


def check_numbers(settings: Settings) -> None:
    """Check each number that the user gave: no number is NaN, infinite, or outside its limits."""
    values = settings.flat() | (asdict(settings.estimate) if settings.estimate else {})
    for flag in settings.names:
        value = values[flag]
        if not isinstance(value, int | float) or (flag, value) in NO_LIMIT.items():
            continue
        lowest, limit = LIMITS.get(flag, (0, LARGEST))
        if not lowest <= value < limit:
            wanted = "above 0" if lowest == ABOVE_ZERO else f"of at least {lowest}"
            below = "" if value < lowest and limit == LARGEST else f" and below {limit}"
            raise settings.error(flag, f"{value!s:.20} is out of range", f"give a number {wanted}{below}")


def doubtful_choices(settings: Settings) -> Iterator[str]:
    """Yield a warning for each choice that is allowed but that people rarely mean."""
    if not settings.model.lora_rank:
        return
    if settings.trainer.learning_rate < LOWEST_USUAL_LORA_RATE:
        yield (
            f"the learning rate {settings.trainer.learning_rate:g} is low for LoRA, which usually needs 1e-4 to 2e-3; "
            "set LEARNING_RATE"
        )
    if has_random_weights(settings.model.model_name, settings.model.from_scratch):
        yield "LORA_RANK freezes weights that are random, so the model learns little; use a pretrained model"


def contradictions(settings: Settings) -> list[tuple[object, str, str, str]]:
    """Return all possible contradictions between flags, and flags without effect.

    Each entry has four parts: a true value if it applies, the flag to name, what is wrong with it, and what to do.
    """
    model = settings.model
    trainer = settings.trainer
    chunked = model.loss == "chunked"
    cut = model.tensor_parallel > 1
    custom = model.model_name == CUSTOM_GPT
    # These modes time kernels. To store the times, inductor calls torch.get_float32_matmul_precision() (PyTorch 2.13,
    # select_algorithm.py and codecache.py). This call fails after --tf32 has set torch.backends.fp32_precision
    compares_kernels = trainer.torch_compile_mode in ("max-autotune", "max-autotune-no-cudagraphs")
    return [
        (
            trainer.deepspeed and trainer.fsdp,
            "deepspeed",
            "cannot be combined with --fsdp, because both shard the model",
            "give one of the two",
        ),
        (
            trainer.fsdp_config and not trainer.fsdp,
            "fsdp_config",
            "has no effect without --fsdp",
            "add --fsdp",
        ),
        (
            chunked and trainer.label_smoothing_factor,
            "label_smoothing_factor",
            "needs the logits, which --loss chunked does not compute",
            "use --loss full",
        ),
        (
            chunked and trainer.use_liger_kernel,
            "use_liger_kernel",
            "has a loss of its own, which would replace --loss chunked",
            "use --loss full",
        ),
        (
            trainer.optim == "adafactor" and (trainer.fsdp or cut),
            "optim",
            "adafactor cannot update sharded parameters",
            "use adamw_torch_fused (the default), adamw_torch, sgd or rmsprop",
        ),
        (
            trainer.tf32 and compares_kernels,
            "tf32",
            f"cannot be combined with {trainer.torch_compile_mode}, which PyTorch 2.13 cannot compile with TF32",
            "leave it out, or use another --torch_compile_mode",
        ),
        (
            cut and trainer.deepspeed,
            "tensor_parallel",
            "cannot be combined with --deepspeed",
            "use --fsdp to shard over the tensor groups",
        ),
        (
            cut and model.lora_rank,
            "lora_rank",
            "cannot be combined with --tensor_parallel, which cuts the layers that get adapters",
            "use --fsdp or a ZeRO-3 config to shard the model",
        ),
        (
            not model.save_merged and not model.lora_rank,
            "save_merged",
            "False has no effect without LoRA, because there are no adapters to save instead of the model",
            "leave it out, or set LORA_RANK",
        ),
        (
            not model.save_merged and has_random_weights(model.model_name, model.from_scratch),
            "save_merged",
            "False would save nothing, because no adapters are saved for a base that starts with random weights",
            "leave it out, or train a pretrained model",
        ),
        (
            settings.data.padding == "none" and (cut or settings.data.labels == "all"),
            "padding",
            "none cannot be combined with --tensor_parallel or --labels all",
            "use --padding longest",
        ),
        (
            trainer.train_sampling_strategy == "group_by_length",
            "train_sampling_strategy",
            "group_by_length would group differently after a resume and on other numbers of ranks",
            "use --padding none --attention sdpa, which leaves out all padding",
        ),
        (
            cut and chunked,
            "loss",
            "chunked needs the whole head, and --tensor_parallel cuts it",
            "use --loss full",
        ),
        (
            custom and model.hidden_size % model.num_heads,
            "num_heads",
            f"{model.num_heads} heads do not divide the hidden size {model.hidden_size}",
            "choose a divisor",
        ),
        (
            custom and settings.data.max_length > model.seq_length,
            "max_length",
            f"{settings.data.max_length} is more than the {model.seq_length} positions of --seq_length",
            "lower it, or raise --seq_length",
        ),
    ]
