"""The table of runs: their arguments, variables and launchers, grouped by runs that must have equal losses."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from helpers import REPOSITORY, XQUAD
from settings.optimizers import ADAMW, BY_FLAG

CONFIGS = sorted(path.stem for path in (REPOSITORY / "ds_configs").glob("*.json"))
FP16_ON_CPU = str(Path(__file__).with_name("fp16_on_cpu.py"))


@dataclass(frozen=True)
class Run:
    """A run of the table.

    ranks: 0 means plain python. launcher: one of `helpers.LAUNCHERS`; without one, the run forks. base: the run of the
    table whose saved model this run trains.
    """

    ranks: int = 0
    arguments: tuple[str, ...] = ()
    variables: dict = field(default_factory=dict)
    script: str = "scripts/train.py"
    launcher: str = ""
    base: str = ""

    @property
    def world(self) -> int:
        return self.ranks or 1

    @property
    def settings(self) -> dict:
        """The run's variables. BATCH_SIZE keeps the sequences of a step or evaluation batch for any number of ranks."""
        model = {"MODEL_NAME": f"output/{self.base}"} if self.base else {}
        return {"BATCH_SIZE": 4 // self.world} | model | self.variables


def deepspeed(config: str, ranks: int = 2, **how: object) -> Run:
    return Run(ranks, ("--deepspeed", f"ds_configs/{config}.json"), **how)


def fsdp(config: str, ranks: int = 2, **how: object) -> Run:
    return Run(ranks, ("--fsdp", "--fsdp_config", f"fsdp_configs/{config}.json"), **how)


# These runs do the same training under every strategy, so all must have equal losses
FSDP = {
    "full_shard": fsdp("full_shard"),
    "shard_grad_op": fsdp("shard_grad_op"),
    "hybrid_shard": fsdp("hybrid_shard"),
    "hybrid_shard_2x2": fsdp("hybrid_shard_2x2", 4),
    "full_shard_activation_checkpointing": fsdp("full_shard_activation_checkpointing"),
}
STRATEGIES = {
    "plain": Run(),
    "ddp": Run(2),
    **{config: deepspeed(config) for config in CONFIGS},
    **FSDP,
}
# Two of these runs use the exact commands of the pages and do not fork from the tests' server
PYTHON, TORCHRUN = "zero1_python", "zero2_cpu_offload_pinned_memory"
STRATEGIES[PYTHON] = deepspeed("zero1", 0, launcher="python")
STRATEGIES[TORCHRUN] = deepspeed(TORCHRUN, launcher="torchrun")
# Strategies call the replaced attention in three ways: directly (plain, DDP and ZeRO-0 to 2), with parameters that
# ZeRO-3's hooks gather, and with FSDP2's blocks computed again in the backward pass
SDPA = {
    f"sdpa_{name}": replace(STRATEGIES[name], variables={"ATTENTION": "sdpa"})
    for name in ("plain", "zero3", "full_shard_activation_checkpointing")
}
CHUNKED = {f"chunked_{name}": replace(STRATEGIES[name], variables={"LOSS": "chunked"}) for name in ("zero2", "zero3")}
COMPILE = {"LOSS": "chunked", "ATTENTION": "sdpa", "TORCH_COMPILE": "True", "PADDING": "longest"}
# This run is a separate command, because inductor starts compiler processes and reads its variables at import
COMPILED = {"compiled": Run(variables=COMPILE, launcher="python")}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++")
# A third of the 256 positions is padding, and the number of labels differs between batches. The loss must depend
# neither on these nor on the batches. The 16 questions are evaluated in batches of 4, or on 2 ranks in batches of 3
# with a padded last batch. In the last step of ODD questions, rank 1 has only questions that accelerate repeats
ODD = {"TRAIN_SIZE": 17}
LABELS = {
    "sequence_longest": Run(variables={"PADDING": "longest"}),
    "answer": Run(variables={"LABELS": "answer"} | ODD),
    "all": Run(variables={"LABELS": "all"}),
}
CHAT = {"DATASET": "chat.jsonl", "PADDING": "longest"}
CHATS = {"chat_plain": Run(variables=CHAT | ODD)} | {
    f"chat_{name}": replace(
        STRATEGIES[name],
        arguments=(*STRATEGIES[name].arguments, "--per_device_eval_batch_size", "3"),
        variables=CHAT | ODD | variables,
    )
    for name, variables in (
        ("ddp", {}),
        ("zero3", {"LOSS": "chunked"}),
        ("full_shard", {"PADDING": "none", "ATTENTION": "sdpa", "LOSS": "chunked"}),
    )
}
GPT_SIZES = {"VOCAB_SIZE": 1024, "HIDDEN_SIZE": 64, "NUM_LAYERS": 2, "NUM_HEADS": 4, "FF_DIM": 128}
GPT = {"MODEL_NAME": "custom-gpt"} | GPT_SIZES
CUSTOM = {
    "gpt_plain": Run(variables=GPT),
    "gpt_full_shard": fsdp("full_shard", variables=GPT),
    "gpt_zero3": deepspeed("zero3", variables=GPT),
}
# The ranks of a tensor group process the same questions, so BATCH_SIZE counts the questions of a group
ONE_BATCH = {"BATCH_SIZE": 4, "SAVE_STRATEGY": "no"}
ONE_GROUP = GPT | ONE_BATCH
SMALL_GROUPS = {"BATCH_SIZE": 2, "SAVE_STRATEGY": "no"}
TWO_GROUPS = GPT | SMALL_GROUPS
TENSOR_PARALLEL = {
    "tp2": Run(2, ("--tensor_parallel", "2"), ONE_GROUP),
    "tp4": Run(4, ("--tensor_parallel", "4"), ONE_GROUP),
    "tp2_fsdp2": Run(4, ("--tensor_parallel", "2", "--fsdp"), TWO_GROUPS),
}
QWEN = {"MODEL_NAME": "./my-qwen", "FROM_SCRATCH": "True", "TOKENIZER_NAME": "tiny-bloom"}
QWENS = {
    "qwen_plain": Run(variables=QWEN),
    "qwen_tp2_fsdp2": replace(TENSOR_PARALLEL["tp2_fsdp2"], variables=QWEN | SMALL_GROUPS),
}
UNTIED = {"llama_tp2": Run(2, ("--tensor_parallel", "2"), QWEN | {"MODEL_NAME": "./my-llama"} | ONE_BATCH)}
MOE = QWEN | {"MODEL_NAME": "./my-mixtral"}
EXPERTS = {"moe_plain": Run(variables=MOE), "moe_zero3": deepspeed("zero3", variables=MOE)}
# fp16 is the default on GPUs. On this CPU it is several times slower than fp32, so the runs are shorter. `make
# test-faults` adds MORE_FP16.
FEWER = {"TRAIN_SIZE": 32, "EVAL_SIZE": 8, "MAX_LENGTH": 96, "LEARNING_RATE": "5e-3"}


def fp16(row: Run, **variables: object) -> Run:
    return replace(row, script=FP16_ON_CPU, variables=row.variables | FEWER | variables)


FP16 = {f"fp16_{name}": fp16(STRATEGIES[name]) for name in ("plain", "zero2", "full_shard")}
MORE_FP16 = {f"fp16_{name}": fp16(STRATEGIES[name]) for name in ("ddp", "zero0", "zero1", "zero3")}
MORE_FP16 |= {
    f"fp16_chunked_{name}": fp16(STRATEGIES[name], LOSS="chunked") for name in ("plain", "zero2", "full_shard")
}
FP16_GPT = {
    "fp16_gpt_plain": fp16(Run(variables=GPT)),
    "fp16_tp2": fp16(TENSOR_PARALLEL["tp2"]),
    "fp16_tp2_fsdp2": fp16(TENSOR_PARALLEL["tp2_fsdp2"]),
}
BF16 = {"FP16": "", "BF16": "True"}
IN_BF16 = {
    "bf16_ddp": Run(2, variables=BF16, launcher="torch.distributed.run"),
    "bf16_zero2": deepspeed("zero2", variables=BF16),
    "bf16_full_shard": fsdp("full_shard", variables=BF16),
}
# LoRA freezes the base model, so the base is the trained model of another run
ADAPTERS = {"LORA_RANK": 4, "LEARNING_RATE": "2e-2"}


def lora(name: str, **variables: object) -> Run:
    row = STRATEGIES[name]
    script = FP16_ON_CPU if variables.pop("precision", "") == "fp16" else row.script
    return replace(row, base="plain", script=script, variables=ADAPTERS | variables)


LORA = {f"lora_{name}": lora(name) for name in ("plain", "ddp", "zero1", "zero2", "zero3", "full_shard")}
LORA |= {f"lora_chunked_{name}": lora(name, LOSS="chunked") for name in ("plain", "zero3", "full_shard")}
MORE_LORA = {
    f"lora_{name}": lora(name)
    for name in ("zero0", "zero2_cpu_offload", "zero3_cpu_offload", *FSDP)
    if name != "full_shard"
}
LORA_COMPILED = {"lora_compiled": Run(base="plain", variables=ADAPTERS | COMPILE, launcher="python")}
LORA_FP16 = {f"lora_fp16_{name}": lora(name, precision="fp16") for name in ("plain", "zero1", "zero3", "full_shard")}
LORA_BF16 = {
    f"lora_bf16_{name}": lora(name, **BF16) for name in ("plain", "ddp", "zero1", "zero2", "zero3", "full_shard")
}
LORA_OTHER_MODELS = {
    f"lora_{base}{name}": replace(row, base=base, variables=ADAPTERS | variables)
    for base, variables in (("qwen_plain", {}), ("gpt_plain", {}), ("chat_plain", CHAT))
    for name, row in (("", Run()), ("_zero3", deepspeed("zero3")), ("_full_shard", fsdp("full_shard")))
}
# A BLOOM of 12 million parameters, whose matrices ZeRO-3 shards. The matrices of tiny-bloom are too small for that.
SHORT = {"TRAIN_SIZE": 16, "BATCH_SIZE": 1, "GRAD_ACC": 2, "EVAL_SIZE": 2, "MAX_LENGTH": 128, "PADDING": "longest"}
SHORT |= {"NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
LARGER = SHORT | {"MODEL_NAME": "./bloom-12m", "FROM_SCRATCH": "True", "TOKENIZER_NAME": "tiny-bloom"}
ZERO3 = ("--deepspeed", "ds_configs/zero3.json", "--max_steps", "2")
LARGE = {"12m_zero3": Run(2, ZERO3, LARGER)}
# The optimizers whose state the estimate knows. zero2.json has no section for another one
METHODS = {"plain": Run(), "full_shard": fsdp("full_shard"), "zero2": Run(2, ("--deepspeed", "zero2.json"))}
OPTIMIZERS = {
    f"{flag}_{name}": replace(row, arguments=(*row.arguments, "--optim", flag, "--max_steps", "2"), variables=SHORT)
    for flag, optimizer in BY_FLAG.items()
    for name, row in METHODS.items()
    if optimizer.state and optimizer.algorithm != ADAMW.algorithm and (optimizer.shardable or name == "plain")
}
TRACKED = {"REPORT_TO": "wandb", "EXPERIMENT_NAME": "tracked", "SAVE_STRATEGY": "no", "EVAL_SIZE": 8}
OTHERS = {"tracked": Run(2, ("--samples_per_gpu", "20"), TRACKED)}
if XQUAD.exists():
    REAL = {"DATASET": XQUAD, "TRAIN_SIZE": 200, "EVAL_SIZE": 20, "NUM_EPOCHS": 1, "PADDING": "longest"}
    OTHERS["xquad"] = Run(variables=REAL | {"MAX_LENGTH": 512, "EM_F1": "True"})
RUNS = STRATEGIES | SDPA | CHUNKED | COMPILED | LABELS | CHATS | CUSTOM | TENSOR_PARALLEL | QWENS | UNTIED | EXPERTS
RUNS |= LORA | MORE_LORA | LORA_COMPILED | LORA_FP16 | LORA_BF16 | LORA_OTHER_MODELS
RUNS |= FP16 | MORE_FP16 | FP16_GPT | IN_BF16 | LARGE | OPTIMIZERS | OTHERS
# Runs whose record has the bytes of the model on each rank: they accumulate gradients in fp32 or bf16
HELD = [
    *STRATEGIES,
    *CHUNKED,
    *LORA,
    *LORA_BF16,
    *TENSOR_PARALLEL,
    *UNTIED,
    "bf16_zero2",
    "bf16_full_shard",
    *LARGE,
    *OPTIMIZERS,
]


def uses(*names: str):
    """Call the test once per named run of the table, with this run as the argument `run`."""
    return pytest.mark.parametrize("run", names, indirect=True)
