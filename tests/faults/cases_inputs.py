"""What a user types or hands over: flags, variables, config files, data, models."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import Bench
from table import case, refused

# fmt: off
# 1. Flags

command_line = partial(refused, "command line")
command_line("unknown flag", "a misspelt flag",
    "--train_siz: unknown flag; did you mean --train_size?", "--train_siz", 3)
command_line("no room", "--max_length below the shortest question",
    "--max_length: leaves no room for the question ...; raise it", "--max_length", 8)

# 2. Variables

environment = partial(refused, "environment")
environment("fp16 without a GPU", "FP16=True on the CPU",
    "FP16: fp16 needs a CUDA GPU and there is none here; ...", FP16="True")
environment("GPU wanted", "REQUIRE_GPU=1 without one", "GPU: PyTorch sees none on ...; ...", code=3, REQUIRE_GPU=1)

# 3. Config files

configs = partial(refused, "configs")
configs("unknown key", "a misspelt section", "a.json: zero_optimisation: unknown key; did you mean zero_optimization?",
    "--deepspeed", "a.json", files={"a.json": '{"zero_optimisation": {}}'})
configs("offload from nowhere", "cpu_offload without a GPU",
    "a.json: cpu_offload needs a GPU to offload from; use another config",
    "--fsdp", "--fsdp_config", "a.json", code=3, files={"a.json": '{"cpu_offload": true}'})
configs("no such block", "a class to wrap that the model has not",
    "a.json: transformer_layer_cls_to_wrap: the model has no GPTBlock; choose from ...",
    "--fsdp", "--fsdp_config", "a.json", files={"a.json": '{"transformer_layer_cls_to_wrap": ["GPTBlock"]}'})

# 4. Data

data = partial(refused, "data")


def squad(*contexts: str, **changes: object) -> str:
    """A SQuAD file with a question per paragraph; changes: of each question."""
    paragraphs = []
    for number, context in enumerate(contexts):
        answer = {"text": context[:3], "answer_start": 0}
        question = {"id": str(number), "question": "What is it?", "answers": [answer]} | changes
        paragraphs.append({"context": context, "qas": [question]})
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})


def dataset(name: str, done: str, content: str | bytes, line: str, **options: object) -> None:
    data(name, done, f"...a.json{line}", "--dataset", "a.json", files={"a.json": content}, **options)


TEN = [f"Context number {number} of ten." for number in range(10)]
data("absent", "a file that is not there", "a.json: there is no such file; ...", "--dataset", "a.json")
data("folder", "a folder instead of a file", "data: Is a directory; ...", "--dataset", "data")
dataset("torn", "a file that is cut off", squad(*TEN)[:200], ": ...line 1 column ...; is the file complete?")
dataset("answer elsewhere", "an answer that does not stand where it should",
    squad(*TEN, answers=[{"text": "Con", "answer_start": 5}]),
    ": data[0].paragraphs[0].qas[0].answers[0]: 'Con' is not at character 5 of its context; correct answer_start")
dataset("too few", "a file with no paragraph to evaluate on", squad(*TEN[:4]),
    ": no question in its held out paragraphs; give --eval_dataset, ...")
data("fewer than wanted", "more questions wanted than there are",
    "--train_size or --samples_per_gpu: 9999 questions wanted, but data/squad_sample.json has 280 to train on; ...",
    "--train_size", 9999)
# fmt: on


@case(
    "data",
    "no blanks",
    "Chinese texts that are longer than --max_length",
    "they keep what fits, and the record counts them",
)
def contexts_without_blanks(bench: Bench):
    bench.write("a.json", squad(*[f"{number}分布式训练把模型放到多个处理器上。" * 40 for number in range(10)]))
    ended = bench.run("--dataset", "a.json", MAX_LENGTH=128)
    assert ended.record["questions_cut"] == {"train": 4, "eval": 2}
    assert "4 of 4 training questions were cut to --max_length" in ended.out


# 5. Models

model = partial(refused, "model folder")
model("absent", "a folder that is not there", "--model_name: there is no folder ./none; ...", "--model_name", "./none")
model(
    "empty",
    "a folder without a model",
    "--model_name: mine cannot be loaded (...); ...",
    *("--model_name", "mine"),
    files={"mine/readme": "nothing"},
)


def damaged(name: str, done: str, line: str, damage: Callable[[Path], object]) -> None:
    """A case that trains a saved model, of which `damage` has changed a file of its folder."""

    def act(bench: Bench) -> None:
        folder = bench.trained().output.rename(bench.folder / "mine")
        damage(folder)
        bench.refuses(line, "--model_name", "mine", JOB_ID="8")

    case("model folder", name, done, f"exit 2: {line}")(act)


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def absent(name: str):
    return lambda folder: (folder / name).unlink()


def holds(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def changed(name: str, **values: object):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


# fmt: off
damaged("torn config", "config.json cut off", "--model_name: mine cannot be loaded (...config.json...); ...",
    cut("config.json", 40))
damaged("no language model", "a model that generates no text", "...mine is a vit model, not a causal LM; ...",
    holds("config.json", '{"model_type": "vit"}'))
CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
damaged("code of its own", "config.json asks for Python files of the folder, for a kind of model of its own",
    "--model_name: mine asks for code of its own, which is never run here; ...",
    changed("config.json", auto_map=CODE, model_type="mine"))
damaged("no tokenizer", "a checkpoint's folder, which holds none",
    "--model_name: mine cannot be loaded (...tokenizer...); ...", absent("tokenizer.json"))
model("few tokens", "a model with fewer tokens than its tokenizer",
    "--model_name: its tokenizer has 2048 tokens, the model 100; ...",
    "--model_name", "mine", "--tokenizer_name", "tiny-bloom", "--from_scratch",
    files={"mine/config.json": json.dumps({"model_type": "gpt2", "vocab_size": 100})})
# fmt: on


@case(
    "model folder",
    "code for a known kind",
    "config.json and the tokenizer's ask for Python files of the folder, for a model that transformers has",
    "trained with the class of transformers; the code is not run",
)
def code_for_a_known_kind(bench: Bench):
    folder = bench.trained().output.rename(bench.folder / "mine")
    changed("config.json", auto_map=CODE)(folder)
    changed("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})(folder)
    (folder / "evil.py").write_text("import os\nos.mkdir('canary')\n")
    assert bench.run("--model_name", "mine", JOB_ID="8").record["status"] == "completed"
    assert not (bench.folder / "canary").exists()


@case(
    "model folder",
    "weights of another model",
    "config.json of one layer more than the weights have",
    "exit 2, and not random weights for it; the record says failed",
)
def weights_of_another_model(bench: Bench):
    folder = bench.trained().output.rename(bench.folder / "mine")
    changed("config.json", n_layer=3)(folder)
    ended = bench.run("--model_name", "mine", code=2, JOB_ID="8")
    assert ended.error.startswith("--model_name: mine has no transformer.h.2.input_layernorm.bias of the shape "), ended
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 2)
