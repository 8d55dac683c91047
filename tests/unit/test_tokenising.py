"""Tests of the path from a question to a batch: the sequence, its labels, EOS, padding, and the cut of long texts."""

import copy
import hashlib
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerFast

from config import IGNORED, DataArguments, ModelArguments
from data_loader import answer_room, collator, tokenise_batch, tokenizer_key
from helpers import REPOSITORY, XQUAD
from model import load_tokenizer
from read_questions import read_file
from tasks.task import decode

SAMPLE = REPOSITORY / "data" / "squad_sample.json"
CONTEXT = "Nodes talk over a fast network. Each node holds eight devices. " * 12
BATCH = {
    "question": ["What do nodes talk over?", "How many devices does each node hold?"],
    "context": [CONTEXT.strip(), "Each node holds eight devices."],
    "answers": [["a fast network", "network"], ["eight"]],
}


CONTROL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
TEXTS = [CONTEXT, *BATCH["question"], "Question: Context: Answer: html </p>"]


def trained(
    model: object, trainer: object, texts: list[str] = TEXTS, first: str = "<s>", **parts: object
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds the token `first` before each text."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(texts, trainer)
    special = [(first, tokenizer.token_to_id(first))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **CONTROL)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The tokenizer of a saved Llama model. It adds <s> before each text and has no pad token."""
    folder = tmp_path_factory.mktemp("llama")
    how = {"special_tokens": list(CONTROL.values()), "show_progress": False}
    parts = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **how)
    trained(models.BPE(unk_token="<unk>"), trainer, **parts).save_pretrained(folder)
    LlamaConfig(vocab_size=600, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    return load_tokenizer(ModelArguments(str(folder)), DataArguments(dataset=str(SAMPLE)))


@pytest.fixture
def unigram():
    """A tokenizer as of XGLM. Its vocabulary contains the control tokens as ordinary pieces of text."""
    how = {"special_tokens": ["</s>", "<s>", "<pad>", "<unk>"], "unk_token": "<unk>", "show_progress": False}
    parts = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    tokenizer = trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=80, **how), first="</s>", **parts)
    tokenizer.pad_token = "<pad>"
    return tokenizer


@pytest.fixture
def llama_2():
    """A tokenizer with the rules of Llama-2 and Mistral: a blank before each text, and no division into words."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rules = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(CONTROL.values()), show_progress=False)
    parts = {"normalizer": normalizers.Sequence(rules), "decoder": decoders.Sequence(steps)}
    return trained(model, trainer, " ".join(TEXTS).split(), **parts)


@pytest.mark.parametrize(("name", "changed"), [("tiny_tokenizer", False), ("unigram", False), ("llama_2", True)])
def test_an_answer_has_the_tokens_that_it_has_in_one_text_with_its_prompt(name, changed, request):
    """With Llama-2's rules, an answer that is tokenised by itself begins with a lone blank. 2.0.0 trained on it."""
    tokenizer = request.getfixturevalue(name)
    for max_length in (512, 96):  # the second one cuts the context
        rows = tokenise_batch(BATCH, tokenizer, max_length, "answer")
        for ids, length, answers in zip(rows["input_ids"], rows["prompt_length"], BATCH["answers"], strict=True):
            prompt = decoded(tokenizer, ids[:length])
            assert prompt.endswith(" Answer:") and not prompt.endswith("  Answer:")
            assert ids[length - 4 : -1] == tokenizer(f"{prompt} {answers[0]}")["input_ids"][length - 4 :]
    alone = tokenizer(" a fast network", add_special_tokens=False)["input_ids"]
    assert (alone != [token for token in rows["labels"][0][:-1] if token != IGNORED]) == changed


@pytest.fixture(params=["tiny_tokenizer", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def decoded(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_tiny_bloom_has_blooms_special_ids_and_ignores_the_subsets(tiny_tokenizer):
    assert tiny_tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<pad>"]) == [0, 1, 2, 3]
    assert (tiny_tokenizer.eos_token_id, tiny_tokenizer.pad_token_id, len(tiny_tokenizer)) == (2, 3, 2048)
    again = load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=str(SAMPLE), train_size=3, eval_size=1))
    assert again.get_vocab() == tiny_tokenizer.get_vocab()


def test_sequence_is_question_context_answer_and_eos(tokenizer):
    rows = tokenise_batch(BATCH, tokenizer, 512, "sequence")
    assert rows["labels"] == rows["input_ids"]
    assert rows["cut"] == [False, False]
    for i, ids in enumerate(rows["input_ids"]):
        prompt = f"Question: {BATCH['question'][i]} Context: {BATCH['context'][i]} Answer:"
        assert decoded(tokenizer, ids) == f"{prompt} {BATCH['answers'][i][0]}"
        assert ids[: rows["prompt_length"][i]] == tokenizer(prompt)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert rows["length"][i] == len(ids) == sum(rows["attention_mask"][i])


@pytest.mark.parametrize("name", ["tiny_tokenizer", "llama", "unigram"])
def test_text_is_never_a_control_token(name, request):
    """EOS in a context would end it, and an answer `</s>` would be trained as two EOS."""
    tokenizer = request.getfixturevalue(name)
    html = "html <s> </s> <pad>"
    batch = {"question": [f"What is {html}?"], "context": [f"A {html} node"], "answers": [[html]]}
    for max_length in (512, 130):
        rows = tokenise_batch(batch, tokenizer, max_length, "answer")
        ids, prompt = rows["input_ids"][0], rows["prompt_length"][0]
        added = tokenizer("a")["input_ids"][:1] if name != "tiny_tokenizer" else []
        assert ids[: len(added)] == added
        assert not set(ids[len(added) : -1]) & {*tokenizer.all_special_ids}
        assert decode(ids[prompt:], tokenizer) == html
        assert decode(ids[:prompt], tokenizer).startswith(f"Question: What is {html}? Context:")


def test_the_key_of_the_token_cache_changes_only_with_the_tokenizer(llama):
    before = tokenizer_key(llama)
    llama("Nodes", padding="max_length", max_length=9, truncation=True)
    assert tokenizer_key(llama) == before
    in_python, other = ByT5Tokenizer(), ByT5Tokenizer(extra_ids=7)
    assert tokenizer_key(in_python) == tokenizer_key(ByT5Tokenizer()) != tokenizer_key(other)
    other = copy.deepcopy(llama)
    other.eos_token = "<unk>"
    assert tokenizer_key(other) != before
    other = copy.deepcopy(llama)
    other.backend_tokenizer.normalizer = normalizers.NFC()
    assert tokenizer_key(other) != before


@pytest.mark.parametrize(("labels", "padding_label"), [("sequence", IGNORED), ("answer", IGNORED), ("all", "pad")])
@pytest.mark.parametrize("padding", ["max_length", "longest"])
def test_padding_counts_only_with_labels_all_and_eos_counts_always(padding, labels, padding_label, tokenizer):
    """With Llama's tokenizer, the EOS token is also the pad token."""
    rows = tokenise_batch(BATCH, tokenizer, 512, labels)
    collate = collator(tokenizer, DataArguments(padding=padding, max_length=512, labels=labels))
    names = ("input_ids", "attention_mask", "labels")
    batch = collate([{name: rows[name][i] for name in names} for i in (0, 1)])
    multiple_of_8 = -(-max(rows["length"]) // 8) * 8
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 512 if padding == "max_length" else multiple_of_8)
    ignored = tokenizer.pad_token_id if padding_label == "pad" else padding_label
    for i, length in enumerate(rows["length"]):
        assert batch["attention_mask"][i].sum() == length
        assert batch["labels"][i, :length].tolist() == rows["labels"][i]
        assert set(batch["labels"][i, length:].tolist()) <= {ignored}
        assert set(batch["input_ids"][i, length:].tolist()) <= {tokenizer.pad_token_id}


LONG = {
    "English": CONTEXT.strip(),
    "Chinese": "节点通过高速网络相互通信，每个节点有八个设备，这些设备共同训练一个语言模型。" * 30,
    "emoji": "Größe 🚀, 🧮 und 🌍: naïve Zürcher 🎓 ✓. " * 30,
    "one word": "parallel" * 200,
}
MAX_LENGTHS = range(40, 136)
# Largest number of tokens that a cut leaves unused: it removes a character of which only some tokens fit
UNUSED = 6


@pytest.mark.parametrize("language", LONG)
def test_a_prompt_that_is_too_long_loses_only_the_end_of_its_context(language, tokenizer):
    """The test uses many limits, so that some of them fall inside a character."""
    context = LONG[language]
    batch = {"question": ["Wo?"], "context": [context], "answers": [["Zürich"]]}
    for max_length in MAX_LENGTHS:
        rows = tokenise_batch(batch, tokenizer, max_length, "sequence")
        assert rows["length"][0] <= max_length
        text = decoded(tokenizer, rows["input_ids"][0])
        assert text.startswith("Question: Wo? Context: ") and text.endswith(" Answer: Zürich"), (max_length, text)
        kept = text.removeprefix("Question: Wo? Context: ").removesuffix(" Answer: Zürich")
        assert kept and context.startswith(kept), f"the text was cut inside a character at {max_length}: {text}"
        room = max_length - answer_room(max_length)
        assert room - UNUSED <= rows["prompt_length"][0] <= room, max_length
        assert rows["cut"] == [True]


def test_an_answer_that_was_cut_out_of_the_context_is_known(tokenizer):
    """The question contains the answer, too, but the model must find it in the context."""
    contexts = [f"Anna. {CONTEXT}", f"{CONTEXT}Anna.", CONTEXT]
    batch = {"question": ["Anna?"] * 3, "context": contexts, "answers": [["Anna"], ["Anna"], ["no answer"]]}
    rows = tokenise_batch(batch, tokenizer, 96, "answer")
    assert (rows["cut"], rows["answer_cut"]) == ([True] * 3, [False, True, False])
    assert not any(tokenise_batch(batch, tokenizer, 512, "answer")["answer_cut"])


def test_a_long_answer_shortens_the_context(tokenizer):
    answer = " ".join(["network"] * 60)
    batch = {"question": ["What?"], "context": [CONTEXT.strip()], "answers": [[answer]]}
    (ids,) = tokenise_batch(batch, tokenizer, 128, "answer")["input_ids"]
    assert len(ids) <= 128
    assert decoded(tokenizer, ids).endswith(f"Answer: {answer}")


# One hash per tokenizer, of the rows of commit 4ff9d584, so that the losses of all earlier runs stay. The vocabulary of
# a trained Unigram differs from time to time, and Llama-2's rules have other tokens since then
GOLDEN = {
    ("squad_sample.json", "tiny_tokenizer"): "3e3362937a4c2705",
    ("squad_sample.json", "llama"): "dc3497303578eeb5",
    ("xquad.en.json", "tiny_tokenizer"): "0f89d049f2040997",
    ("xquad.en.json", "llama"): "04438764267a8d06",
}


@pytest.mark.parametrize(("file", "name"), GOLDEN)
def test_passages_have_the_tokens_that_they_always_had(file, name, request):
    path = SAMPLE if file == SAMPLE.name else XQUAD
    if not path.exists():
        pytest.skip(f"{path} is not here")
    questions = read_file(str(path)).examples[:: 1 if path == SAMPLE else 5]
    digest = hashlib.sha256()
    for max_length in (64, 128, 512):
        fitting = [question for question in questions if 3 * len(question["question"]) < max_length]
        batch = {column: [question[column] for question in fitting] for column in fitting[0]}
        rows = tokenise_batch(batch, request.getfixturevalue(name), max_length, "answer")
        digest.update(json.dumps([rows[column] for column in ("input_ids", "labels", "prompt_length")]).encode())
    assert digest.hexdigest()[:16] == GOLDEN[file, name]
