"""Check settings without a process group and without data. Each check raises WorkshopError (exit code 2)."""

from collections.abc import Iterator
from dataclasses import asdict

from config import CUSTOM_GPT, facts, has_random_weights, knobs_of
from settings.hints import UNUSED_FLAGS
from settings.optimizers import SHARDABLE, choose_optimizer
from settings.settings import Settings

LOWEST_USUAL_LORA_RATE = 1e-4


def check_settings(settings: Settings) -> None:
    values = settings.flat() | (asdict(settings.estimate) if settings.estimate else {})
    of_estimate = knobs_of(settings.estimate) if settings.estimate else {}
    for flag in sorted(settings.names):
        knob = of_estimate.get(flag) or facts(flag)
        if refusal := knob.limits.refusal(values[flag]):
            raise settings.error(flag, *refusal)
        if flag in UNUSED_FLAGS:
            raise settings.error(flag, "has no effect in this workshop", UNUSED_FLAGS[flag])
        if not settings.has(knob):
            what = f"has no effect on {settings.model.model_name}"
            raise settings.error(flag, what, f"leave it out, or train {knob.only_for}")
    for applies, flag, what, remedy in contradictions(settings):
        if applies:
            raise settings.error(flag, what, remedy)


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
            not choose_optimizer(settings).shardable and (trainer.fsdp or cut),
            "optim",
            f"{trainer.optim} cannot update shards",
            f"use one of {SHARDABLE}",
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
