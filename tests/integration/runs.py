"""The table of runs, with their launcher and process count, and where the expected values come from."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from helpers import REPOSITORY, Process, start

CONFIGS = sorted(path.stem for path in (REPOSITORY / "ds_configs").glob("*.json"))
MEASURE = str(Path(__file__).with_name("measure_memory.py"))
FP16_ON_CPU = str(Path(__file__).with_name("fp16_on_cpu.py"))
XQUAD = REPOSITORY.parent / "shared" / "data" / "xquad.en.json"


@dataclass(frozen=True)
class Run:
    processes: int = 1
    launcher: str = "python"
    arguments: tuple[str, ...] = ()
    variables: dict = field(default_factory=dict)
    script: str = "scripts/train.py"

    def start(self, folder: Path, name: str) -> Process:
        # The same sequences in every step and in every batch of the evaluation, on one process and on two
        batch_size = {"BATCH_SIZE": 4 // self.processes}
        variables = batch_size | self.variables
        launch = {"processes": self.processes, "launcher": self.launcher, "script": self.script}
        return start(folder, name, *self.arguments, **launch, **variables)


def deepspeed(config: str, processes: int, **variables: object) -> Run:
    """The pages' commands as printed."""
    launcher = "python" if processes == 1 else "torchrun"
    return Run(processes, launcher, ("--deepspeed", f"ds_configs/{config}.json"), variables)


def fsdp(config: str, processes: int, **variables: object) -> Run:
    launcher = "python" if processes == 1 else "torchrun"
    return Run(processes, launcher, ("--fsdp", "--fsdp_config", f"fsdp_configs/{config}.json"), variables)


# Every way to spread the same training: all must end with the same losses
STRATEGIES = {
    "plain": Run(),
    "ddp-1": Run(1, "torchrun"),
    "ddp-2": Run(2, "torchrun"),
    **{f"{config}-1": deepspeed(config, 1) for config in CONFIGS},
    **{f"{config}-2": deepspeed(config, 2) for config in CONFIGS},
}
FSDP = {
    "full_shard-1": fsdp("full_shard", 1),
    "full_shard-2": fsdp("full_shard", 2),
    "shard_grad_op-2": fsdp("shard_grad_op", 2),
    "full_shard_activation_checkpointing-2": fsdp("full_shard_activation_checkpointing", 2),
    "hybrid_shard-2": fsdp("hybrid_shard", 2),
    "hybrid_shard_2x2-4": fsdp("hybrid_shard_2x2", 4),
}
STRATEGIES |= FSDP
FP16_SHARDED = ["zero0-1", "zero1-1", "zero2-1", "zero3-1", "full_shard-2"]
CHUNKED_STRATEGIES = ["plain", "ddp-2", "zero0-2", "zero1-1", "zero1-2", "zero2-1", "zero2-2", "zero3-1", "zero3-2"]
CHUNKED_STRATEGIES += ["zero3_cpu_offload-2", "full_shard-1", "full_shard-2", "shard_grad_op-2"]
CHUNKED_STRATEGIES += ["full_shard_activation_checkpointing-2", "hybrid_shard_2x2-4"]
CHUNKED = {f"chunked_{name}": replace(STRATEGIES[name], variables={"LOSS": "chunked"}) for name in CHUNKED_STRATEGIES}
COMPILE = {"LOSS": "chunked", "TORCH_COMPILE": "True", "PADDING": "longest"}
COMPILED = {"compiled_ddp": replace(STRATEGIES["ddp-2"], variables=COMPILE)}
GPT_SIZES = {"VOCAB_SIZE": 1024, "HIDDEN_SIZE": 64, "NUM_LAYERS": 2, "NUM_HEADS": 4, "FF_DIM": 128}
GPT = {"MODEL_NAME": "custom-gpt"} | GPT_SIZES
CUSTOM = {
    "gpt_plain": Run(variables=GPT),
    "gpt_ddp": Run(2, "torchrun", variables=GPT),
    "gpt_full_shard": fsdp("full_shard", 2, **GPT),
    "gpt_shard_grad_op": fsdp("shard_grad_op", 2, **GPT),
    "gpt_hybrid_shard_2x2": fsdp("hybrid_shard_2x2", 4, **GPT),
    "gpt_zero3": deepspeed("zero3", 2, **GPT),
}
PADDING = {
    "sequence_longest": Run(variables={"PADDING": "longest"}),
    "answer_max_length": Run(variables={"LABELS": "answer"}),
    "answer_longest": Run(variables={"LABELS": "answer", "PADDING": "longest"}),
    "all_max_length": Run(variables={"LABELS": "all"}),
}
# Every method in fp16, with both losses
FP16 = {f"fp16_{name}": replace(STRATEGIES[name], script=FP16_ON_CPU) for name in ["plain", "ddp-2", *FP16_SHARDED]}
FP16 |= {
    f"fp16_chunked_{name}": replace(STRATEGIES[name], script=FP16_ON_CPU, variables={"LOSS": "chunked"})
    for name in ("plain", "zero2-1", "full_shard-2")
}
# Few labels count, and not equally many in each batch: the evaluation must not depend on how the ranks divide them. 32
# questions in batches of 2 x 3, the last one of which is filled up, against batches of 4
EVALUATED = ("--per_device_eval_batch_size", "3")
OTHER_BATCHES = {
    f"{labels}_{name}": replace(
        STRATEGIES[name],
        arguments=(*STRATEGIES[name].arguments, *EVALUATED),
        variables={"LABELS": labels, "LOSS": loss},
    )
    for labels, name, loss in (
        ("answer", "ddp-2", "full"),
        ("answer", "zero3-2", "full"),
        ("answer", "full_shard-2", "chunked"),
        ("sequence", "ddp-2", "full"),
    )
}
OTHERS = {
    "unsaved": Run(variables={"SAVE_STRATEGY": "no", "TRAIN_SIZE": 16, "EVAL_SIZE": 4}),
    "bf16_plain": Run(variables={"FP16": "", "BF16": "True"}),
    "bf16_zero2": deepspeed("zero2", 1, FP16="", BF16="True"),
    "bf16_ddp-2": Run(2, "torch.distributed.run", variables={"FP16": "", "BF16": "True"}),
    "wandb": fsdp("full_shard", 2, REPORT_TO="wandb", EXPERIMENT_NAME="tracked", SAVE_STRATEGY="no"),
    "20_per_rank": Run(2, "torchrun", ("--samples_per_gpu", "20"), {"EVAL_SIZE": 8}),
}
if XQUAD.exists():
    REAL = {"DATASET": XQUAD, "TRAIN_SIZE": 500, "EVAL_SIZE": 100, "NUM_EPOCHS": 1, "PADDING": "longest"}
    OTHERS["xquad"] = Run(variables=REAL | {"MAX_LENGTH": 512, "EM_F1": "True"})
# What each rank holds meanwhile, is written down by these strategies' own runs of the table, and by short ones: in
# bf16, and of a BLOOM of 51 million parameters
STAGES = ["zero0-2", "zero1-2", "zero2-2", "zero3-2"]
STAGES += ["full_shard-2", "shard_grad_op-2", "hybrid_shard-2", "hybrid_shard_2x2-4"]
OFFLOADS = [name for name in STRATEGIES if "cpu_offload-2" in name]
for name in [*STAGES, *OFFLOADS]:
    STRATEGIES[name] = replace(STRATEGIES[name], script=MEASURE)
SHORT = {"EVAL_SIZE": 2, "MAX_LENGTH": 128, "PADDING": "longest", "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
SHORT |= {"TRAIN_SIZE": 16, "BATCH_SIZE": 1, "GRAD_ACC": 2}
BF16 = {"FP16": "", "BF16": "True"}
BLOOM_50M = {"MODEL_NAME": "./bloom-50m", "FROM_SCRATCH": "True", "TOKENIZER_NAME": "tiny-bloom"}


def short(name: str, variables: dict) -> Run:
    """Two steps: the second begins with the optimizer's state there."""
    run = STRATEGIES[name]
    return replace(run, arguments=(*run.arguments, "--max_steps", "2"), variables=SHORT | variables, script=MEASURE)


MEASURED = {name: STRATEGIES[name] for name in [*STAGES, *OFFLOADS]}
MEASURED |= {f"tiny_{name}": short(name, {}) for name in ("plain", "ddp-2")}
MEASURED |= {f"tiny_bf16_{name}": short(name, BF16) for name in ("zero0-2", "zero2-2", "full_shard-2")}
MEASURED |= {f"50m_{name}": short(name, BLOOM_50M) for name in STAGES}
RUNS = STRATEGIES | FP16 | OTHER_BATCHES | CHUNKED | COMPILED | CUSTOM | PADDING | OTHERS | MEASURED


def uses(*names: str):
    """Run the test once per named run of the table; it gets the run as its argument `run`."""
    return pytest.mark.parametrize("run", names, indirect=True)
