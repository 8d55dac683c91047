"""Fine-tune without the Trainer: the loop that `trainer.train()` runs, in one file to read from top to bottom.

    python scripts/loop.py                                                         # one process
    torchrun --nproc_per_node=2 scripts/loop.py                                    # DDP
    torchrun --nproc_per_node=2 scripts/loop.py --deepspeed ds_configs/zero2.json  # ZeRO
    torchrun --nproc_per_node=2 scripts/loop.py --fsdp                             # FSDP2

The losses equal those of train.py, with the same flags, variables and config files. loop.py saves nothing. It rejects
each flag and variable that it does not support but that could change a loss, such as LORA_RANK. docs/training-loop.md
says what the Trainer adds.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from math import ceil

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType, DummyOptim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import TrainingArguments, get_scheduler, set_seed
from transformers.trainer_pt_utils import get_parameter_names

from config import CUSTOM_SIZES, IGNORED
from data_loader import collator, load_data
from distributed.collectives import local_world_size, print_once, world_size
from distributed.config_file import read_config_file, start_process_group
from distributed.fsdp_config import shard_on_cpu
from distributed.process_group import leave_process_group, prepare_environment, run_and_exit
from model import load_model, load_tokenizer
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from settings.settings import Settings

SUPPORTED = (  # flags that work as in scripts/train.py
    *("model_name", "from_scratch", "tokenizer_name", "attention", *CUSTOM_SIZES),
    *("dataset", "eval_dataset", "table_columns", "bad_rows", "train_size", "eval_size", "samples_per_gpu"),
    *("max_length", "labels", "seed", "data_seed", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "logging_steps", "learning_rate", "warmup_steps"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("fp16", "bf16", "tf32", "use_cpu", "deepspeed", "fsdp", "fsdp_config"),
)
SUPPORTED_VALUES = {  # flags of which only some values are supported
    "padding": ("max_length", "longest"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "loss": ("full",),
    "optim": ("adamw_torch_fused",),
    "lora_rank": (0,),
    "tensor_parallel": (1,),
    **dict.fromkeys(("activation_checkpointing", "torch_compile", "profile"), (False,)),
}
WITHOUT_EFFECT = (  # flags that cannot change a loss, which are accepted and ignored
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node", "output_dir"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "enable_jit_checkpoint"),
    *("em_f1", "em_f1_batch_size", "show", "report_to", "run_name", "project", "disable_tqdm"),
    *("logging_strategy", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node"),
    *("include_num_input_tokens_seen", "skip_memory_metrics", "dataloader_num_workers", "ddp_timeout", "local_rank"),
)


def main() -> None:
    # 1. Settings, and the group of all ranks
    settings, args = start()
    accelerator = make_accelerator(settings, args)

    # 2. Data. The seed chooses the questions, so that all ranks have the same ones
    tokenizer = load_tokenizer(settings.model, settings.data)
    columns = ["input_ids", "attention_mask", "labels"]
    data = load_data(settings.data, tokenizer, args)
    train_set, eval_set = data.train.select_columns(columns), data.evaluation.select_columns(columns)
    collate = collator(tokenizer, settings.data)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, collate_fn=collate)

    # 3. Model and optimizer. With ZeRO-3, each rank keeps only its shard of each weight
    model = load_model(settings.model, tokenizer, args.seed)
    optimizer = make_optimizer(model, settings, args)

    # 4. The strategy. prepare() wraps the model in DDP, DeepSpeed or FSDP, and divides the batches among the ranks
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    if accelerator.process_index:
        # Otherwise, all ranks would have the same dropout masks
        set_seed((args.seed + accelerator.process_index) % 2**32)

    # 5. The schedule of the learning rate. Count the steps after prepare(), which leaves a rank only its own batches
    steps_per_epoch = ceil(len(train_loader) / args.gradient_accumulation_steps)
    last_step = args.max_steps if args.max_steps > 0 else ceil(args.num_train_epochs * steps_per_epoch)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(last_step), last_step)
    logging_steps = ceil(args.logging_steps * (last_step if args.logging_steps < 1 else 1))  # may be a fraction
    print_once(f"{type(model).__name__}, ranks: {accelerator.num_processes}, steps: {last_step}")

    # 6. Training, with an evaluation after each epoch
    step = 0
    losses = []  # losses since the last printed line
    while step < last_step:
        train_loader.set_epoch(step // steps_per_epoch)  # each epoch has its own order of the questions
        for micro_batches in optimizer_steps(train_loader, accelerator, args.gradient_accumulation_steps):
            losses.append(train_step(micro_batches, model, optimizer, schedule, accelerator, args.max_grad_norm))
            step += 1
            if step % logging_steps == 0 or step == last_step:
                print_once(f"step {step}: loss {accelerator.reduce(sum(losses)).item() / len(losses):.6f}")
                losses = []
            if step == last_step:
                break
        print_once(f"step {step}: eval_loss {evaluate(model, eval_loader, accelerator):.6f}")
    leave_process_group()


def own_batches(loader: DataLoaderShard, accelerator: Accelerator) -> Iterator[dict]:
    """Yield the batches of this rank.

    The ranks take the batches in turns. To give all ranks equally many whole batches, accelerate repeats questions at
    the end. The labels of repeated questions do not count.
    """
    rank, ranks, size = accelerator.process_index, accelerator.num_processes, loader.batch_sampler.batch_size
    for number, batch in enumerate(loader):
        first_question = (number * ranks + rank) * size
        batch["labels"][max(0, len(loader.dataset) - first_question) :] = IGNORED
        yield batch


def optimizer_steps(loader: DataLoaderShard, accelerator: Accelerator, accumulation: int) -> Iterator[list[dict]]:
    """Yield the micro batches of each optimizer step of an epoch. The last step may have fewer."""
    batches = own_batches(loader, accelerator)
    while micro_batches := list(islice(batches, accumulation)):
        yield micro_batches


def train_step(
    micro_batches: list[dict],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    accelerator: Accelerator,
    max_norm: float,
) -> torch.Tensor:
    """Update the weights once. Return this rank's part of the loss: the loss is the sum of all ranks' parts."""
    model.train()
    # By default, DeepSpeed also divides the loss by the number of micro batches
    options = {"scale_wrt_gas": False} if accelerator.distributed_type == DistributedType.DEEPSPEED else {}
    # All tokens of the global batch count equally, in whichever micro batch and on whichever rank they are
    tokens = accelerator.reduce(sum(count_labels(batch) for batch in micro_batches))
    step_loss = torch.zeros((), device=accelerator.device)
    for batch in micro_batches:
        is_last = batch is micro_batches[-1]
        accelerator.sync_gradients = is_last  # DeepSpeed clips and updates at the end of the last backward pass
        # Earlier micro batches only add to the gradients, so DDP, FSDP and ZeRO-1 need not reduce these yet
        with nullcontext() if is_last else accelerator.no_sync(model):
            # The loss is the sum over the tokens of this micro batch, divided by those of the global batch
            loss = model(**batch, num_items_in_batch=tokens).loss
            # Every strategy then divides the sum of the ranks' gradients by the number of ranks. But `tokens` already
            # counts the tokens of all ranks, so multiply by this number first
            accelerator.backward(loss * accelerator.num_processes, **options)
        step_loss += loss.detach()
    if max_norm > 0:
        accelerator.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    if not accelerator.optimizer_step_was_skipped:  # fp16 skips a step whose gradients overflow
        schedule.step()
    optimizer.zero_grad()
    return step_loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoaderShard, accelerator: Accelerator) -> float:
    """Return the mean loss of all tokens that count, for any number of ranks and any batch size."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # losses, tokens
    for batch in own_batches(loader, accelerator):
        tokens = count_labels(batch)
        loss = model(**batch).loss  # the mean over the batch's tokens, NaN if there are none
        sums += torch.stack([torch.where(tokens > 0, loss * tokens, 0.0), tokens])
    loss, tokens = accelerator.reduce(sums).tolist()
    return loss / tokens


def count_labels(batch: dict) -> torch.Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()  # the first label is the target of no position


def start() -> tuple[Settings, TrainingArguments]:
    """Read flags, variables and the config file, and open the process group. TrainingArguments need no Trainer."""
    settings = parse_command_line(__doc__)
    reject_unsupported(settings)
    prepare_environment(shards=bool(settings.trainer.deepspeed or settings.trainer.fsdp))
    settings = read_config_file(settings, world_size(), local_world_size())
    return settings, start_process_group(settings)


def reject_unsupported(settings: Settings) -> None:
    """Raise WorkshopError (exit code 2) for a flag or variable that was given and could make the losses differ."""
    for flag in sorted(settings.names.keys() - {*SUPPORTED, *WITHOUT_EFFECT}):
        if settings.flat()[flag] not in SUPPORTED_VALUES.get(flag, ()):
            what = f"loop.py does not support the value {settings.flat()[flag]}"
            raise settings.error(flag, what, "leave it out, or use train.py")


def make_accelerator(settings: Settings, args: TrainingArguments) -> Accelerator:
    """Return the Accelerator with the plugin of the strategy. Several ranks without a plugin use DDP."""
    fsdp_plugin = None
    if settings.fsdp_config is not None:
        shard_on_cpu()  # without this, accelerate silently uses DDP if there is no GPU
        dtype = DTYPES[settings.precision]
        # accelerate's own policy would also round the loss to 16 bits
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args, mixed_precision_policy=policy)
    return Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        fsdp_plugin=fsdp_plugin,
        parallelism_config=args.parallelism_config,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=args.seed if args.data_seed is None else args.data_seed
        ),
    )


def make_optimizer(
    model: torch.nn.Module, settings: Settings, args: TrainingArguments
) -> torch.optim.Optimizer | DummyOptim:
    """Return AdamW, or a placeholder for the optimizer that a DeepSpeed config names."""
    if "optimizer" in (settings.deepspeed_config or {}):
        return DummyOptim(list(model.parameters()))  # under DeepSpeed, weight decay applies to every parameter
    # Biases and norms do not decay
    names = get_parameter_names(model, [torch.nn.LayerNorm], ["bias", "norm"])
    decay: list[torch.nn.Parameter] = []
    no_decay: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decay if name in names else no_decay).append(parameter)
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, args.learning_rate, (args.adam_beta1, args.adam_beta2), args.adam_epsilon, fused=True
    )


if __name__ == "__main__":
    run_and_exit(main)
