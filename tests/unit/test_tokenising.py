"""From question to batch: one sequence, its labels, its EOS, its padding, and what is cut when it is too long."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from data_loader import IGNORED, answer_room, collator, tokenise_batch
from helpers import REPOSITORY
from knobs import DataArguments, ModelArguments
from model import load_tokenizer

SAMPLE = REPOSITORY / "data" / "squad_sample.json"
CONTEXT = "Nodes talk over a fast network. Each node holds eight devices. " * 12
BATCH = {
    "question": ["What do nodes talk over?", "How many devices does each node hold?"],
    "context": [CONTEXT.strip(), "Each node holds eight devices."],
    "answers": [["a fast network", "network"], ["eight"]],
}


@pytest.fixture(scope="session")
def bloom():
    return load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=str(SAMPLE)))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The tokenizer of a saved Llama: <s> in front of every text, and no pad token."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([CONTEXT, *BATCH["question"], "Question: Context: Answer:"], trainer)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("llama")
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=trained, **names).save_pretrained(folder)
    LlamaConfig(vocab_size=600, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    return load_tokenizer(ModelArguments(str(folder)), DataArguments(dataset=str(SAMPLE)))


@pytest.fixture(params=["bloom", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def collate(tokenizer, rows: dict, **options: object) -> dict:
    names = ("input_ids", "attention_mask", "labels")
    features = [{name: rows[name][i] for name in names} for i in range(len(rows["labels"]))]
    return collator(tokenizer, DataArguments(**options))(features)


def test_tiny_bloom_has_blooms_special_ids_and_depends_on_no_subset(bloom):
    assert bloom.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<pad>"]) == [0, 1, 2, 3]
    assert (bloom.eos_token_id, bloom.pad_token_id, len(bloom)) == (2, 3, 2048)
    again = load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=str(SAMPLE), train_size=3, eval_size=1))
    assert again.get_vocab() == bloom.get_vocab()
    text = "Größe: 5 µm — naïve"
    assert bloom.decode(bloom(text)["input_ids"]) == text


def test_model_without_a_pad_token_pads_with_its_eos(llama):
    assert llama.pad_token_id == llama.eos_token_id == 2
    assert llama.padding_side == "right"


def test_sequence_is_question_context_answer_and_eos(tokenizer):
    rows = tokenise_batch(BATCH, tokenizer, 512, "sequence")
    for i, ids in enumerate(rows["input_ids"]):
        question, context, answer = BATCH["question"][i], BATCH["context"][i], BATCH["answers"][i][0]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == f"Question: {question} Context: {context} Answer: {answer}"
        assert ids[-1] == tokenizer.eos_token_id
        assert ids.count(tokenizer.eos_token_id) == 1
        prompt = ids[: rows["prompt_length"][i]]
        assert prompt == tokenizer(f"Question: {question} Context: {context} Answer:")["input_ids"]
        assert rows["length"][i] == len(ids) == len(rows["attention_mask"][i])
        assert set(rows["attention_mask"][i]) == {1}


def test_labels_are_the_whole_sequence_or_answer_and_eos_alone(tokenizer):
    whole = tokenise_batch(BATCH, tokenizer, 512, "sequence")
    assert whole["labels"] == whole["input_ids"]
    answer = tokenise_batch(BATCH, tokenizer, 512, "answer")
    for labels, ids, prompt in zip(answer["labels"], answer["input_ids"], answer["prompt_length"], strict=True):
        assert labels == [IGNORED] * prompt + ids[prompt:]
        counted = [token for token in labels if token != IGNORED]
        assert counted[-1] == tokenizer.eos_token_id
    assert tokenizer.decode([t for t in answer["labels"][0] if t != IGNORED][:-1]) == " a fast network"


@pytest.mark.parametrize(("padding", "width"), [("max_length", 512), ("longest", None)])
@pytest.mark.parametrize("labels", ["sequence", "answer"])
def test_padding_never_counts_and_the_eos_does(padding, width, labels, tokenizer):
    rows = tokenise_batch(BATCH, tokenizer, 512, labels)
    batch = collate(tokenizer, rows, padding=padding, max_length=512, labels=labels)
    longest = -(-max(rows["length"]) // 8) * 8
    assert batch["input_ids"].shape == batch["labels"].shape == (2, width or longest)
    for i, length in enumerate(rows["length"]):
        assert batch["attention_mask"][i].sum() == length
        assert batch["labels"][i, :length].tolist() == rows["labels"][i]
        assert batch["labels"][i, length - 1] == tokenizer.eos_token_id
        assert set(batch["labels"][i, length:].tolist()) <= {IGNORED}
        assert set(batch["input_ids"][i, length:].tolist()) <= {tokenizer.pad_token_id}


def test_labels_all_count_the_padding_too(tokenizer):
    rows = tokenise_batch(BATCH, tokenizer, 512, "all")
    batch = collate(tokenizer, rows, max_length=512, labels="all")
    assert (batch["labels"] == batch["input_ids"]).all()
    assert (batch["labels"] != IGNORED).all()
    assert batch["attention_mask"].sum() == sum(rows["length"])


@pytest.mark.parametrize("max_length", [64, 100, 128])
def test_over_long_prompt_loses_context_only(max_length, tokenizer):
    rows = tokenise_batch(BATCH, tokenizer, max_length, "sequence")
    ids, prompt = rows["input_ids"][0], rows["prompt_length"][0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    begin, end = f"Question: {BATCH['question'][0]} Context: ", " Answer: a fast network"
    assert text.startswith(begin)
    assert text.endswith(end)
    kept = text.removeprefix(begin).removesuffix(end)
    assert kept
    assert kept != BATCH["context"][0]
    assert BATCH["context"][0].startswith(kept)
    assert len(ids) <= max_length
    assert prompt <= max_length - answer_room(max_length)
    rest = BATCH["context"][0].removeprefix(kept)
    longer = [f"{begin}{kept}{rest[:more].rstrip()} Answer:" for more in range(8, 40)]
    room = max_length - answer_room(max_length)
    assert min(len(ids) for ids in tokenizer(longer)["input_ids"]) > room, "more of the context would have fitted"
    assert rows["cut"] == [True, False]


CHINESE = "节点通过高速网络相互通信，每个节点有八个设备，这些设备共同训练一个语言模型。" * 30
NO_SPACES = {"Chinese": CHINESE, "no letter of the tokenizer": "ⵣⵉⵔⵉ" * 200, "one word": "parallel" * 200}


@pytest.mark.parametrize("context", NO_SPACES.values(), ids=NO_SPACES)
@pytest.mark.parametrize("max_length", [64, 65, 66])
def test_context_without_spaces_keeps_what_fits(context, max_length, tokenizer):
    batch = {"question": ["Wo?"], "context": [context], "answers": [["Zürich"]]}
    rows = tokenise_batch(batch, tokenizer, max_length, "sequence")
    prompt = rows["input_ids"][0][: rows["prompt_length"][0]]
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    kept = text.removeprefix("Question: Wo? Context: ").removesuffix(" Answer:")
    assert kept, "all of the context is lost"
    assert context.startswith(kept), "half of a character"
    room = max_length - answer_room(max_length)
    assert room - 10 < len(prompt) <= room, "a character has up to three tokens, a word as many as its letters"
    assert rows["cut"] == [True]


def test_answer_longer_than_its_usual_room_takes_it_from_the_context(tokenizer):
    answer = " ".join(["network"] * 60)
    batch = {"question": ["What?"], "context": [CONTEXT.strip()], "answers": [[answer]]}
    rows = tokenise_batch(batch, tokenizer, 128, "answer")
    assert len(rows["input_ids"][0]) <= 128
    assert tokenizer.decode(rows["input_ids"][0], skip_special_tokens=True).endswith(f"Answer: {answer}")


def test_question_that_does_not_fit_is_refused(tokenizer, refusal):
    line = refusal(tokenise_batch, BATCH, tokenizer, 8, "sequence")
    assert line == "error: --max_length: leaves no room for the question 'What do nodes talk over?'; raise it"
