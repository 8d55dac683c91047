"""Train tiny models with TRL's SFTTrainer, and save its losses. tests/integration/test_trl.py expects them of train.py.

    pip install -r benchmarks/requirements.txt
    python benchmarks/losses_of_trl.py        # writes benchmarks/losses_of_trl.json

Each case trains on 128 rows of one kind of data, in 16 steps with a global batch of 8, in fp32 and without packing. TRL
gets the rows in the order of train.py. Where it needs marks for the tokens that count, it gets the same chat template
with marks. The file also has a hash of the tokens and labels of all rows.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from harness import SAMPLE, SCRIPTS

sys.path.append(str(SCRIPTS))
from shared.before_imports import prepare_imports

prepare_imports()

from datasets import Dataset
from transformers import TrainingArguments

from data_loader import load_data, tokens_hash
from model import load_model, load_tokenizer
from settings.command_line import parse_command_line
from tasks.chat import PLAIN_TEMPLATE

SAVED = Path(__file__).with_suffix(".json")
SIZES = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA, QWEN = ("llama", "--padding longest"), ("qwen2", "--padding none --attention sdpa")
# Kind of the rows, the model with its flags, and --labels
CASES = {
    "completion_answer": ("completion", *LLAMA, "answer"),
    "completion_sequence": ("completion", *QWEN, "sequence"),
    "chat_answer": ("chat", *QWEN, "answer"),
    "chat_sequence": ("chat", *LLAMA, "sequence"),
    "chat_last_answer": ("last answer", *LLAMA, "answer"),
    "text": ("text", *QWEN, "sequence"),
}
# The flags of a run that have the same names and values in TRL
SHARED = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 4e-3,
    "weight_decay": 0.01,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "use_cpu": True,
}
# tasks/chat.py::PLAIN_TEMPLATE with marks
MARKED_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '' if loop.first else '\n' }}{{ message.role | capitalize }}:"
    "{% if message.role == 'assistant' %}"
    "{% generation %} {{ message.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %} {{ message.content | trim }}{% endif %}"
    "{% endfor %}"
)


def prepare(case: str, folder: Path) -> list[str]:
    """Write the model's sizes and the rows of a case into a folder. Return the flags of train.py."""
    kind, model, words, labels = CASES[case]
    (folder / model).mkdir(parents=True, exist_ok=True)
    tied = model == "qwen2"
    (folder / model / "config.json").write_text(json.dumps(SIZES | {"model_type": model, "tie_word_embeddings": tied}))
    data = folder / f"{kind}.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in make_rows(kind)))
    flags = ["--model_name", str(folder / model), "--dataset", str(data), "--eval_dataset", str(data)]
    flags += f"--from_scratch True --tokenizer_name tiny-bloom --max_length 256 --eval_size 8 {words}".split()
    if kind != "text":  # all tokens of a text count
        flags += ["--labels", labels]
    return flags + [word for name, value in SHARED.items() for word in (f"--{name}", str(value))]


def make_rows(kind: str) -> list[dict]:
    """Return 128 rows of a kind, from the questions and passages of the sample."""
    articles = json.loads(SAMPLE.read_text())["data"]
    passages = [passage for article in articles for passage in article["paragraphs"]]
    asked = [(each["question"], each["answers"][0]["text"]) for passage in passages for each in passage["qas"]]
    if kind == "completion":
        return [{"prompt": f"{question}\nAnswer:", "completion": f" {answer}"} for question, answer in asked[:128]]
    numbers = random.Random(0)
    if kind == "text":
        return [{"text": passages[i % len(passages)]["context"][: numbers.randint(80, 400)]} for i in range(128)]
    rows = []
    for _ in range(128):
        messages = [{"role": "system", "content": "Be short."}] * numbers.randint(0, 1)
        for question, answer in numbers.sample(asked, numbers.randint(1, 3)):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        whole = {"messages": messages}
        rows.append(whole if kind == "chat" else {"prompt": messages[:-1], "completion": messages[-1:]})
    return rows


def load_rows(flags: list[str]) -> Dataset:
    """Return the rows of tokens that train.py trains on."""
    settings = parse_command_line("", flags)
    return load_data(
        settings.data, load_tokenizer(settings.model, settings.data), TrainingArguments(use_cpu=True)
    ).train


def train_with_trl(case: str, folder: Path) -> dict:
    """Train on the rows of a case. Return the loss of each step, and the hash of the tokens and labels."""
    from trl import SFTConfig, SFTTrainer

    kind, _, _, labels = CASES[case]
    flags = prepare(case, folder)
    settings = parse_command_line("", flags)
    tokenizer = load_tokenizer(settings.model, settings.data)
    numbers = [int(place.removeprefix("line ")) - 1 for place in load_rows(flags)["id"]]
    rows = make_rows(kind)
    answers = labels == "answer"
    if kind == "chat":
        tokenizer.chat_template = MARKED_TEMPLATE
    elif kind == "last answer":
        tokenizer.chat_template = PLAIN_TEMPLATE
    config = SFTConfig(
        **SHARED,
        output_dir=str(folder / "trl"),
        loss_type="nll",
        max_length=256,
        assistant_only_loss=kind == "chat" and answers,
        completion_only_loss=answers if kind in ("completion", "last answer") else None,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(
        load_model(settings.model, tokenizer, config.seed),
        config,
        train_dataset=Dataset.from_list([rows[number] for number in numbers]),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"tokens": tokens_hash(trainer.train_dataset), "losses": losses}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        SAVED.write_text(json.dumps({case: train_with_trl(case, Path(folder)) for case in CASES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
