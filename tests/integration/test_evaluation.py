"""Tests of Exact Match and F1 in real runs, which need the metric, the labels and generation together."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from transformers import pipeline

from helpers import REPOSITORY, Finished
from test_models import small_tokenizer

# For speed, a limit of 128 tokens truncates the contexts. The longest of the 16 answers still fits.
SHORT = {"MAX_LENGTH": 128, "PADDING": "longest", "EM_F1": "True"}


def first_questions(folder: Path, number: int, start: int = 0) -> dict:
    """Settings that train and evaluate on the first questions of the sample from `start`, one per paragraph."""
    articles = json.loads((REPOSITORY / "data" / "squad_sample.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]][start:][:number]
    paragraphs = [{"context": p["context"], "qas": p["qas"][:1]} for p in paragraphs]
    path = folder / f"{number}_questions_from_{start}.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "few", "paragraphs": paragraphs}]}))
    return SHORT | {"DATASET": path, "EVAL_DATASET": path, "TRAIN_SIZE": number, "EVAL_SIZE": number}


@pytest.fixture(scope="module")
def evaluate(train) -> Callable[..., dict[str, float]]:
    """Return the EM and F1 that evaluate.py prints for the saved model of a run."""

    def scores(trained: Finished, name: str, **options: object) -> dict[str, float]:
        words = ("--model_name", f"output/{trained.job_id}")
        done = train(name, *words, script="scripts/evaluate.py", **options)
        (line,) = [line.split() for line in done.log.splitlines() if line.startswith("exact_match ")]
        assert not done.record_path.exists()
        return {line[0]: float(line[1]), line[2]: float(line[3])}

    return scores


@pytest.fixture(scope="module")
def overfitted(train, workplace) -> Finished:
    settings = first_questions(workplace, 16) | {
        "NUM_EPOCHS": 80,
        "SAVE_STRATEGY": "steps",
        "BATCH_SIZE": 2,
        "GRAD_ACC": 1,
    }
    return train("overfitted", "--labels", "answer", "--eval_strategy", "no", "--save_steps", 1000, **settings)


def test_a_model_learns_16_questions_by_heart(overfitted: Finished):
    record = overfitted.record
    assert (record["exact_match"], record["f1"]) == (100, 100)
    assert record["pauses"][-1]["what"] == "evaluation"
    assert "exact_match 100.00  f1 100.00\n" in overfitted.log
    assert record["train"]["loss_last"] < 0.3


def test_zero3_and_evaluate_score_an_uneven_number_of_questions(train, workplace, overfitted, evaluate):
    """The model knows 16 of 17 answers. In batches of 4, one rank gets 3 batches of real questions, and one gets 2."""
    settings = first_questions(workplace, 17) | {"EM_F1_BATCH_SIZE": 4}
    once = {"NUM_EPOCHS": 1, "LEARNING_RATE": 1e-5, "LABELS": "answer", "MODEL_NAME": "output/overfitted"}
    trained = train("odd_zero3", "--deepspeed", "ds_configs/zero3.json", ranks=2, **settings | once)
    assert trained.effective("strategy") == "DeepSpeed ZeRO-3"
    # 16 correct answers of 17 are 94.1 percent, but the additional training steps can change this score
    assert 50 < trained.record["exact_match"] < 100
    assert trained.record["exact_match"] <= trained.record["f1"] < 100
    recorded = {name: round(trained.record[name], 2) for name in ("exact_match", "f1")}
    # evaluate.py must ignore a training size larger than the file
    assert evaluate(trained, "evaluated_by_1", **settings | {"TRAIN_SIZE": 500, "EM_F1_BATCH_SIZE": 3}) == recorded
    assert evaluate(trained, "evaluated_by_2", ranks=2, **settings) == recorded


@pytest.mark.promise("Tensor parallelism: the same losses, also in fp16; what it refuses; a stop")
def test_tensor_parallel_qwen_generates_the_answers_of_one_rank(train, workplace, evaluate):
    """The model comes from a local folder: each rank loads all of it before tensor parallelism shards it."""
    settings = first_questions(workplace, 7) | {"LABELS": "answer", "EM_F1_BATCH_SIZE": 2, "SAVE_STRATEGY": "no"}
    by_heart = settings | {"NUM_EPOCHS": 80, "SAVE_STRATEGY": "steps", "BATCH_SIZE": 1, "GRAD_ACC": 1, "EM_F1": "False"}
    from_scratch = ("--model_name", "./my-qwen", "--from_scratch", "--tokenizer_name", "tiny-bloom")
    train("qwen", *from_scratch, "--eval_strategy", "no", "--save_steps", 1000, **by_heart)
    once = {"NUM_EPOCHS": 1, "LEARNING_RATE": 1e-5, "BATCH_SIZE": 2, "MODEL_NAME": "output/qwen"}
    trained = train("odd_tp", "--tensor_parallel", 2, "--fsdp", ranks=4, **settings | once)
    assert trained.effective("strategy") == "TP x FSDP2"
    assert trained.record["exact_match"] == 100
    assert evaluate(trained, "tp_evaluated", **settings) == {"exact_match": 100, "f1": 100}


@pytest.mark.promise("LoRA: the saved model is merged; a checkpoint resumes exactly")
def test_the_merged_model_of_lora_has_the_scores_of_base_and_adapters(train, workplace, overfitted, evaluate):
    """The adapters learn other questions, so the model forgets some of the 16 answers that it knew."""
    known, others = first_questions(workplace, 16), first_questions(workplace, 7, start=16)
    settings = others | {"EVAL_DATASET": known["EVAL_DATASET"], "EVAL_SIZE": 16}
    lora = {"MODEL_NAME": "output/overfitted", "LABELS": "answer", "LORA_RANK": 8, "LEARNING_RATE": "5e-3"}
    lora |= {"NUM_EPOCHS": 20, "BATCH_SIZE": 1, "GRAD_ACC": 1}
    trained = train("lora_scored", "--fsdp", "--eval_strategy", "no", ranks=2, **settings | lora)
    recorded = {name: round(trained.record[name], 2) for name in ("exact_match", "f1")}
    assert 0 < recorded["exact_match"] < 100, "equal scores prove nothing if the adapters change no answer"
    assert evaluate(trained, "lora_evaluated", **settings) == recorded


# ask.py and --show


@pytest.mark.promise("your own model and data: from a table to a model that answers")
def test_a_question_to_the_saved_model(train, workplace, overfitted):
    path = workplace / "16_questions_from_0.json"
    paragraph = json.loads(path.read_text())["data"][0]["paragraphs"][3]
    (workplace / "text.txt").write_text(paragraph["context"] + "\n", encoding="utf-8")
    question, answer = paragraph["qas"][0]["question"], paragraph["qas"][0]["answers"][0]["text"]
    words = ("--model_name", "output/overfitted", "--context", "text.txt", "--max_length", 128)
    asked = train("asked", *words, question, script="scripts/ask.py", MODEL_NAME="")
    assert asked.out.splitlines()[-1] == answer
    shown = train("shown", *words[:2], "--show", 16, script="scripts/evaluate.py", **first_questions(workplace, 16))
    assert f"question: {question}\n  right answer: {answer}\n  model's answer: {answer}\n" in shown.log
    assert shown.log.count("\nquestion: ") == 16


@pytest.mark.promise("your own model and data: from a table to a model that answers")
def test_a_chat_model_gives_the_answers_of_the_pipeline_of_transformers(train, workplace):
    knobs = {"TRAIN_SIZE": 8, "EVAL_SIZE": 4, "NUM_EPOCHS": 25, "BATCH_SIZE": 1, "GRAD_ACC": 1, "PADDING": "longest"}
    flags = ("--dataset", "data/conversations.jsonl", "--eval_strategy", "no", "--save_strategy", "steps")
    trained = train("chat", *flags, **knobs)
    (workplace / "text.txt").write_text("A rank is one process.\n")
    words = ("--model_name", "output/chat", "What does ZeRO-1 divide over the GPUs?")
    about = "Question: What does ZeRO-1 divide over the GPUs? Context: A rank is one process. Answer:"
    generate = pipeline("text-generation", model=str(trained.output), device="cpu", dtype=torch.float32)
    for name, more, content in (("chat_asked", (), words[-1]), ("about_a_text", ("--context", "text.txt"), about)):
        asked = train(name, *words, *more, "--max_length", 160, script="scripts/ask.py", MODEL_NAME="")
        (answer,) = generate([{"role": "user", "content": content}], do_sample=False, max_length=160)
        text = answer["generated_text"][-1]["content"].strip()
        assert len(text) > 20 and asked.out == f"{text}\n"


# A model that knows all answers, and a folder with other settings for generation

HARD = {"DATASET": "hard.json", "EVAL_DATASET": "hard.json", "TRAIN_SIZE": "all", "EVAL_SIZE": "all", "MODEL_NAME": ""}
HARD |= {"EM_F1": "True", "LABELS": "answer", "BATCH_SIZE": 1, "GRAD_ACC": 1, "LEARNING_RATE": "5e-3"}
BEAMS = {"num_beams": 4, "no_repeat_ngram_size": 3, "repetition_penalty": 1.5, "max_length": 20}
BEAMS |= {"do_sample": True, "temperature": 2.0}


def hard_answer(colour: str) -> str:
    words = "seven nodes send many gradients over fast networks"
    return " ".join(f"{colour} {word} cafe\u0301 </s>" for word in words.split())


@pytest.fixture(scope="module")
def knows_all(train, workplace) -> Finished:
    """A model that has learned long answers with `</s>`, repeated words and decomposed letters by heart.

    Its tokenizer composes the letters, as that of Qwen2 does, so the model cannot give the letters of the file.
    """
    paragraphs = []
    for colour in ("red", "blue"):
        answers = [{"text": hard_answer(colour), "answer_start": 0}]
        qas = [{"question": f"Which {colour}?", "answers": answers}]
        paragraphs.append({"context": f"{hard_answer(colour)} and <s>.", "qas": qas})
    (workplace / "hard.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    tokenizer = small_tokenizer(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert len(tokenizer(hard_answer("red"))["input_ids"]) >= 80
    tokenizer.save_pretrained(workplace / "composing")
    sizes = {"model_type": "bloom", "vocab_size": 600, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    (workplace / "composing/config.json").write_text(json.dumps(sizes))
    words = ("--from_scratch", "--eval_strategy", "no", "--save_steps", 1000)
    by_heart = HARD | {"MODEL_NAME": "./composing", "NUM_EPOCHS": 100, "SAVE_STRATEGY": "steps"}
    return train("knows_all", *words, **by_heart)


@pytest.mark.promise("EM and F1 measure the model, whatever its folder and the length of its answers")
def test_a_model_that_knows_long_answers_scores_100(knows_all, train, workplace, evaluate):
    assert (knows_all.record["exact_match"], knows_all.record["f1"]) == (100, 100), knows_all
    assert knows_all.record["unfair_questions"] == {}
    path = knows_all.output / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | BEAMS))
    assert evaluate(knows_all, "knows_all_evaluated", **HARD) == {"exact_match": 100, "f1": 100}
    once = HARD | {"MODEL_NAME": "output/knows_all", "NUM_EPOCHS": 1, "LEARNING_RATE": 1e-5}
    again = train("knows_all_zero3", "--deepspeed", "ds_configs/zero3.json", ranks=2, **once)
    assert (again.record["exact_match"], again.record["f1"]) == (100, 100), again
    saved = json.loads((again.output / "generation_config.json").read_text())
    assert saved | BEAMS == saved
    (workplace / "text.txt").write_text(hard_answer("red"))
    words = ("--model_name", "output/knows_all", "--context", "text.txt", "Which red?")
    asked = train("asked_long", *words, script="scripts/ask.py", MODEL_NAME="")
    assert asked.out.splitlines()[-1] == unicodedata.normalize("NFC", hard_answer("red"))
