"""Count every collective of one optimizer step under each strategy, in short training runs on the CPU.

    python benchmarks/communication.py                            # all rows, with accumulation 1 and 4 (ten minutes)
    python benchmarks/communication.py --rows DDP ZeRO-2          # only these rows
    python benchmarks/communication.py --save                     # also write communication.json, for the pages

Each row is a run of scripts/train.py for a few steps in bf16, with two or four ranks over gloo. A dispatch mode of
PyTorch sees the tensors of every collective that DDP, DeepSpeed, FSDP2 and the Trainer start, from Python or from C++.
The benchmark counts the kind, number and size of the collectives, which do not depend on the hardware. It skips
messages of less than 1 KiB, such as a loss, a norm or a stop flag.
benchmarks/rehearse.py counts the collectives of rank 0 in the same way for any world size.
tests/integration/test_rehearse.py compares its counts with these results.

`payload`: bytes of the whole tensor (the parts of all ranks together) in one optimizer step, per model parameter.
`sent`: bytes that each rank sends in one optimizer step, per model parameter, if there are very many ranks. A ring
sends the payload once in an all-gather, a reduce-scatter and a broadcast, and twice in an all-reduce (Patarasuk and
Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002). With n ranks, each rank sends (n - 1) / n of these bytes.
The saved results, with commit and versions, are in benchmarks/communication.json and docs/collectives.md.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness import (
    REPOSITORY,
    RESULT,
    SAMPLE,
    SCRIPTS,
    commit,
    make_model_folder,
    read_result,
    run_training,
    save_rows,
    versions,
)

sys.path.insert(0, str(SCRIPTS))
from rehearsal.read_collective import SENT, SMALL, read_collective

# The blocks have about the same share of the parameters as in bloom-1b1. With a larger embedding or fewer blocks, a
# single layer would dominate the counts.
CONFIG = {"model_type": "bloom", "vocab_size": 12288, "hidden_size": 256, "n_layer": 8, "n_head": 4}
TOKENS = 4096  # vocabulary of the tokenizer
RESULTS = Path(__file__).with_suffix(".json")
STEPS = 4
COUNTED_STEP = 3  # In the first step the libraries create buffers and record the order of the layers.

FSDP = ["--fsdp", "--fsdp_config"]
ROWS = {
    "DDP": [],
    "ZeRO-0": ["--deepspeed", "ds_configs/zero0.json"],
    "ZeRO-1": ["--deepspeed", "ds_configs/zero1.json"],
    "ZeRO-2": ["--deepspeed", "ds_configs/zero2.json"],
    "ZeRO-2, reduce to owner": ["--deepspeed", "zero2_reduce.json"],
    "ZeRO-3": ["--deepspeed", "ds_configs/zero3.json"],
    "ZeRO-3, bloom-560m 1:256": ["--deepspeed", "zero3_256.json", "--model_name", "bloom_256"],
    "ZeRO-3, bloom-3b 1:1600": ["--deepspeed", "zero3_1600.json", "--model_name", "bloom_1600"],
    "FULL_SHARD": [*FSDP, "fsdp_configs/full_shard.json"],
    "SHARD_GRAD_OP": [*FSDP, "fsdp_configs/shard_grad_op.json"],
    "HYBRID_SHARD 2 x 2": [*FSDP, "fsdp_configs/hybrid_shard_2x2.json"],
}
# BLOOM has no plan for tensor parallelism. These rows train the custom GPT with the same width, depth and vocabulary.
GPT = ["--model_name", "custom-gpt", "--vocab_size", "12288", "--hidden_size", "256", "--num_layers", "8"]
GPT += ["--num_heads", "4", "--ff_dim", "1024", "--tensor_parallel"]
ROWS |= {"TP 2": [*GPT, "2"], "TP 2 x FSDP 2": [*GPT, "2", "--fsdp"]}
ROWS |= {f"LoRA, {method}": [*ROWS[method], "--lora_rank", "8"] for method in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")}
ROWS["LoRA, ZeRO-3, checkpointing"] = [*ROWS["LoRA, ZeRO-3"], "--activation_checkpointing"]
ROWS["LoRA, FULL_SHARD"] = [*ROWS["FULL_SHARD"], "--lora_rank", "8"]
RANKS = {"HYBRID_SHARD 2 x 2": 4, "TP 2 x FSDP 2": 4}
# ZeRO-3 frees gathered layers at limits of 10^9 parameters, and a model this small never reaches them. So the limits
# are divided by a scale (256 or 1600). The hidden size and vocabulary of a BLOOM are divided by the square root of the
# scale. The config's "auto" sizes follow the hidden size.
LIMITS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
SCALED = {
    256: CONFIG | {"vocab_size": 250880 // 16, "hidden_size": 1024 // 16, "n_layer": 24},
    1600: CONFIG | {"vocab_size": 250880 // 40, "hidden_size": 2560 // 40, "n_layer": 30},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--save", action="store_true", help=f"replace these rows in {RESULTS.name}")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    results = {"versions": versions(), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder / "model", CONFIG, TOKENS)
        for scale, config in SCALED.items():
            make_model_folder(folder / f"bloom_{scale}", config, TOKENS)
            (folder / f"zero3_{scale}.json").write_text(json.dumps(scaled_zero3(scale)))
        (folder / "zero2_reduce.json").write_text(json.dumps(zero2_reduce()))
        for strategy in arguments.rows:
            for accumulation in arguments.accumulation:
                row = {"strategy": strategy, "accumulation": accumulation, "commit": commit()}
                row |= train(folder, strategy, accumulation)
                results["rows"].append(row)
                print(f"{strategy}, accumulation {accumulation}: {describe(row)}", flush=True)
    if arguments.save:
        save_rows(RESULTS, results, key=lambda row: (list(ROWS).index(row["strategy"]), row["accumulation"]))


def read_results() -> dict:
    """Read the saved results."""
    return json.loads(RESULTS.read_text())


def zero2_reduce() -> dict:
    """Config of ZeRO-2 with a reduce of each gradient to its owner, instead of an all-reduce of each bucket."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
    return config


def scaled_zero3(scale: int) -> dict:
    """Config of ZeRO-3 whose limits are divided by `scale`."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= dict.fromkeys(LIMITS, 10**9 // scale)
    return config


def train(folder: Path, row: str, accumulation: int) -> dict:
    """Run a row. Return rank 0's `parameters` and `collectives`, a list of [kind, dtype, ranks, number, bytes]."""
    ranks = RANKS.get(row, 2)
    words = ["--model_name", str(folder / "model"), "--from_scratch", "--dataset", str(SAMPLE), "--bf16"]
    words += ["--max_steps", str(STEPS), "--gradient_accumulation_steps", str(accumulation), "--no_em_f1"]
    words += ["--train_size", str(ranks * accumulation * STEPS), "--eval_size", str(ranks), "--max_length", "64"]
    words += ["--per_device_train_batch_size", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    words += [str(REPOSITORY / word) if "/" in word else word for word in ROWS[row]]
    output, _ = run_training(folder, [__file__, "--child", *words], ranks)
    return read_result(output)


def describe(row: dict) -> str:
    return "; ".join(
        f"{number} x {kind} of {ranks} ranks in {dtype}, {size / row['parameters']:.2f} bytes per parameter"
        for kind, dtype, ranks, number, size in row["collectives"]
    )


def payload(row: dict, kind: str) -> float:
    """Bytes per parameter of all collectives of this kind in a step."""
    return sum(size for name, *_, size in row["collectives"] if name == kind) / row["parameters"]


def sent(row: dict) -> float:
    """Bytes per parameter that each rank sends in a step, with very many ranks and ring algorithms."""
    return sum(factor * payload(row, kind) for kind, factor in SENT.items())


def page_table(results: dict, strategies: Sequence[str]) -> str:
    """Return the table of some strategies, for the pages."""
    rows = [row for row in results["rows"] if row["strategy"] in strategies]
    kinds = [
        kind
        for kind in ("all-reduce", "reduce", "reduce-scatter", "all-gather")
        if any(payload(row, kind) for row in rows)
    ]
    columns = ("Strategy", "Accumulation", *(kind.capitalize() for kind in kinds), "Sent")
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for row in rows:
        numbers = [payload(row, kind) for kind in kinds]
        assert abs(sum(SENT[kind] * number for kind, number in zip(kinds, numbers, strict=True)) - sent(row)) < 1e-6
        cells = [f"{number:.1f}" if number else "-" for number in numbers]
        lines.append(f"| {row['strategy']} | {row['accumulation']} | {' | '.join(cells)} | {sent(row):.1f} |")
    return "\n".join(lines)


def child(flags: list[str]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import Trainer, TrainerCallback

    import train

    class Count(TorchDispatchMode):
        number: Counter = Counter()
        bytes: Counter = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            collective = read_collective(func, args)
            if collective and collective.size >= SMALL:
                key = (collective.kind, collective.dtype, len(collective.ranks))
                self.number[key] += 1
                self.bytes[key] += collective.size
            return func(*args, **(kwargs or {}))

    count = Count()

    class StepCounter(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == COUNTED_STEP - 1:
                count.number.clear()
                count.bytes.clear()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == COUNTED_STEP and state.is_world_process_zero:
                found = [[*key, number, count.bytes[key]] for key, number in count.number.items()]
                print(RESULT + json.dumps({"parameters": self.parameters, "collectives": found}), flush=True)

    plain = Trainer.train

    def counted(self, *args, **kwargs):
        self.add_callback(StepCounter())
        with count:
            return plain(self, *args, **kwargs)

    Trainer.train = counted  # type: ignore[method-assign]
    sys.argv[1:] = flags
    train.run_and_exit(train.main)


if __name__ == "__main__":
    main()
