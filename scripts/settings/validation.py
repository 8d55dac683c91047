"""Checks of the settings that need neither a process group nor the data. Each raises WorkshopError (exit code 2)."""

from config import CUSTOM_GPT, CUSTOM_SIZES
from settings.hints import UNUSED_FLAGS
from settings.settings import Settings

AT_LEAST_ONE = (
    *("train_size", "eval_size", "samples_per_gpu", "max_length", "em_f1_batch_size", "max_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout"),
    "tensor_parallel",
    *CUSTOM_SIZES,
)
# The three of steps may be a part of the training, such as 0.1
MORE_THAN_ZERO = ("num_train_epochs", "learning_rate", "logging_steps", "eval_steps", "save_steps")


def check_settings(settings: Settings) -> None:
    check_numbers(settings)
    check_combinations(settings)
    if settings.model.tensor_parallel > 1:
        check_with_tensor_parallel(settings)
    if settings.model.model_name == CUSTOM_GPT:
        check_custom_sizes(settings)
    else:
        refuse_custom_sizes(settings)


def check_numbers(settings: Settings) -> None:
    values = settings.flat()
    for flag in settings.names:
        number = values.get(flag)
        no_limit = flag == "max_steps" and number == -1
        if flag in AT_LEAST_ONE and number < 1 and not no_limit:
            raise settings.error(flag, f"{number} is too small", "give a whole number of at least 1")
        if flag in MORE_THAN_ZERO and not 0 < number < float("inf"):
            raise settings.error(flag, f"{number} is out of range", "give a number above 0")


def check_combinations(settings: Settings) -> None:
    """Refuse flags that contradict each other, or would have no effect."""
    trainer = settings.trainer
    for flag in sorted(settings.names.keys() & UNUSED_FLAGS.keys()):
        raise settings.error(flag, "has no effect in this workshop", UNUSED_FLAGS[flag])
    if trainer.deepspeed and trainer.fsdp:
        raise settings.error("deepspeed", "cannot be combined with --fsdp, both shard the model", "give one of the two")
    if trainer.fsdp_config and not trainer.fsdp:
        raise settings.error("fsdp_config", "does nothing without --fsdp", "add --fsdp")
    if settings.model.loss == "chunked" and trainer.label_smoothing_factor:
        raise settings.error("label_smoothing_factor", "needs the logits, and chunked has none", "use --loss full")
    if settings.model.loss == "chunked" and trainer.use_liger_kernel:
        raise settings.error("use_liger_kernel", "has a loss of its own, which would run instead", "use --loss full")
    if trainer.optim == "adafactor" and (trainer.fsdp or settings.model.tensor_parallel > 1):
        what = "adafactor cannot step parameters that are sharded"
        raise settings.error("optim", what, "use adamw_torch_fused (the default), adamw_torch, sgd or rmsprop")
    # Both modes compare kernels, and inductor files the times under torch.get_float32_matmul_precision() (PyTorch 2.13,
    # select_algorithm.py and codecache.py). That raises once torch.backends.fp32_precision is "tf32", as --tf32 sets it
    if trainer.tf32 and trainer.torch_compile_mode in ("max-autotune", "max-autotune-no-cudagraphs"):
        what = f"cannot be combined with {trainer.torch_compile_mode}, which PyTorch 2.13 then cannot compile"
        raise settings.error("tf32", what, "leave it out, or use another --torch_compile_mode")


def check_with_tensor_parallel(settings: Settings) -> None:
    """Refuse what a model that is cut into columns and rows cannot do."""
    if settings.trainer.deepspeed:
        way_out = "use --fsdp for the ranks beside a tensor group"
        raise settings.error("tensor_parallel", "cannot be combined with --deepspeed", way_out)
    if settings.model.loss == "chunked":
        raise settings.error("loss", "chunked needs a head in one piece, --tensor_parallel cuts it", "use --loss full")


def check_custom_sizes(settings: Settings) -> None:
    model = settings.model
    if model.hidden_size % model.num_heads:
        what = f"{model.num_heads} heads do not divide the hidden size {model.hidden_size}"
        raise settings.error("num_heads", what, "choose a divisor")
    if settings.data.max_length > model.seq_length:
        what = f"{settings.data.max_length} is more than the {model.seq_length} positions of --seq_length"
        raise settings.error("max_length", what, "lower it, or raise --seq_length")


def refuse_custom_sizes(settings: Settings) -> None:
    for flag in sorted(settings.names.keys() & set(CUSTOM_SIZES)):
        way_out = f"leave it out, or train {CUSTOM_GPT}"
        raise settings.error(flag, f"has no effect on {settings.model.model_name}", way_out)
