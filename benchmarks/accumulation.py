"""Compare gradients that are accumulated and reduced in 16-bit precision with fp32 ones, for DDP, ZeRO-2 and FSDP2.

    python benchmarks/accumulation.py

Each row trains tiny-bloom with scripts/train.py in bf16, with two ranks on the CPU (gloo). A micro batch has one
question, and the accumulation is 16. All rows start with the same weights and use the same questions.

The first number is the relative difference (L2 norm) between this row's gradient in the first step and the gradient
of the same method in fp32. The second number is the evaluation loss after the training.
docs/deepspeed-config.md shows the results.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from harness import REPOSITORY, SAMPLE, SCRIPTS, run_training

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
FP32_REDUCTION = {"communication_data_type": "fp32"}
FSDP = ["--fsdp", "--fsdp_config", str(REPOSITORY / "fsdp_configs/full_shard.json")]
# name -> flags or DeepSpeed config, keys to add to that config, and the reference row: the row itself or an earlier one
ROWS: dict[str, tuple[list[str], dict, str]] = {
    "DDP": ([], {}, "DDP"),
    "ZeRO-2, all in fp32": (["zero2"], FP32_ACCUMULATION | FP32_REDUCTION, "ZeRO-2, all in fp32"),
    "ZeRO-2, accumulated in fp32": (["zero2"], FP32_ACCUMULATION, "ZeRO-2, all in fp32"),
    "ZeRO-2": (["zero2"], {}, "ZeRO-2, all in fp32"),
    "FSDP2, all in fp32": (FSDP, {}, "FSDP2, all in fp32"),
    "FSDP2": (FSDP, {}, "FSDP2, all in fp32"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", default="4")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child[:2], arguments.child[2:])
        return
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row, (*_, reference) in ROWS.items():
            found[row], loss = train(folder, row, arguments.epochs)
            error = float((found[row] - found[reference]).norm() / found[reference].norm())
            print(f"| {row} | {100 * error:.2f} % | {loss:.5f} |", flush=True)


def train(folder: Path, row: str, epochs: str) -> tuple[torch.Tensor, float]:
    """Return the gradient of the first step, and the evaluation loss after the training."""
    flags, keys, _ = ROWS[row]
    if flags and not flags[0].startswith("--"):
        config = json.loads((REPOSITORY / "ds_configs" / f"{flags[0]}.json").read_text()) | keys
        (folder / "ds.json").write_text(json.dumps(config))
        flags = ["--deepspeed", "ds.json"]
    words = ["--model_name", "tiny-bloom", "--dataset", str(SAMPLE), "--bf16", "--no_em_f1"]
    words += ["--train_size", "128", "--eval_size", "64", "--max_length", "128", "--per_device_train_batch_size", "1"]
    words += ["--gradient_accumulation_steps", "16", "--num_train_epochs", epochs, "--learning_rate", "2e-3"]
    words += ["--save_strategy", "no", *flags]
    _, record = run_training(folder, [__file__, "--child", row, str(folder / "gradient"), *words], ranks=2)
    parts = [torch.load(folder / f"gradient_{rank}.pt", weights_only=True) for rank in range(2)]
    # With ZeRO, each rank saves half of the flat gradient. With DDP and FSDP2, each rank saves the whole gradient.
    whole = parts[0] if flags[:1] != ["--deepspeed"] else torch.cat(parts)
    return whole, record["eval"][-1]["loss"]


def child(row: str, file: str, flags: list[str]) -> None:
    sys.path.insert(0, str(SCRIPTS))
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import train
    from training.trainer import WorkshopTrainer

    def keep_gradient(optimizer, args, kwargs) -> None:
        """Save the gradient that AdamW uses in its first step."""
        path = Path(f"{file}_{os.environ['RANK']}.pt")
        if not steps:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            whole = [(g.full_tensor() if isinstance(g, DTensor) else g).flatten().float() for g in grads]
            torch.save(torch.cat(whole), path)
        steps.append(optimizer)

    steps: list = []
    register_optimizer_step_pre_hook(keep_gradient)
    if row == "FSDP2, all in fp32":  # an FSDP config file has no key for the dtype of the reduction
        plain = WorkshopTrainer.__init__

        def with_fp32(self, *args, **kwargs):
            plain(self, *args, **kwargs)
            plugin = self.accelerator.state.fsdp_plugin
            plugin.mixed_precision_policy = dataclasses.replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32
            )

        WorkshopTrainer.__init__ = with_fp32
    sys.argv[1:] = flags
    train.run_and_exit(train.main)


if __name__ == "__main__":
    main()
