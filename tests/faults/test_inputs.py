"""Tests of wrong or dangerous input: flags, variables, config files, data and models. tests/unit tests more cases."""

import json
import os

import pytest

from helpers import REPOSITORY
from shell import program
from workbench import Bench

CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
OWN_CODE = json.dumps({"model_type": "mine", "auto_map": CODE})
TOKENIZER = ["--from_scratch", "--tokenizer_name", "tiny-bloom"]
# fmt: off
REFUSED = {  # the error line, the flags, and a dictionary of files, variables and the exit code (by default 2)
    "unknown flag": ("--train_siz: unknown flag; did you mean --train_size?", ["--train_siz", 3], {}),
    "fp16 without a GPU": ("FP16: fp16 needs a CUDA GPU, and this machine has none; ...", [], {"FP16": "True"}),
    "a required GPU": ("GPU: PyTorch sees none on ...; ...", [], {"REQUIRE_GPU": 1, "code": 3}),
    "truncated data": ("...a.json: ...line 1 column ...; is the file complete?",
                       ["--dataset", "a.json"], {"files": {"a.json": '{"version": "1.1", "data": [{'}}),
    "data that is nested too deep": ("a.json: maximum recursion depth exceeded...; is the file complete?",
                                     ["--dataset", "a.json"], {"files": {"a.json": "[" * 10_000}}),
    "a model's own code": ("--model_name: mine asks for code of its own, which is never run here; ...",
                           ["--model_name", "mine"], {"files": {"mine/config.json": OWN_CODE}}),
    "a model that cannot recompute": ("--activation_checkpointing: CustomGPTForCausalLM cannot recompute its blocks; "
                                      "leave it out, or set activation_checkpointing in an FSDP config file",
                                      ["--activation_checkpointing", "--model_name", "custom-gpt", *TOKENIZER], {}),
    "a model with too few tokens": ("--model_name: its tokenizer has 2048 tokens, the model 100; use a matching ...",
                                    ["--model_name", "gpt", *TOKENIZER],
                                    {"files": {"gpt/config.json": '{"model_type": "gpt2", "vocab_size": 100}'}}),
    "too few questions": ("--train_size or --samples_per_gpu: 9999 rows requested, but data/squad_sample.json has only "
                          "280 to train on; lower it, or give all", ["--train_size", 9999], {}),
    "too few to evaluate on": ("--eval_size: 68 rows requested, but data/squad_sample.json has only 67 to evaluate on; "
                               "lower it, or give all", ["--eval_size", 68], {}),
    "FSDP1 without a GPU": ("fsdp_configs/fsdp1_full_shard.json: FSDP1 needs a GPU: it crashes with gloo; use an FSDP2 "
                            "config", ["--fsdp", "--fsdp_config", "fsdp_configs/fsdp1_full_shard.json"], {"code": 3}),
    "FSDP1 with LoRA": ("fsdp_configs/fsdp1_full_shard.json: version: FSDP1 has not been tried with --lora_rank; use "
                        "an FSDP2 config", ["--fsdp", "--fsdp_config", "fsdp_configs/fsdp1_full_shard.json",
                                         "--lora_rank", 8], {}),
    "a flag that transformers rejects": ("command line: --load_best_model_at_end requires ...; see --help",
                                         ["--save_strategy", "steps", "--load_best_model_at_end"], {}),
    "a launcher's variable": ("WORLD_SIZE: is 'abc', not a whole number; unset it, or give a whole number",
                              [], {"WORLD_SIZE": "abc"}),
    "a run that saved only adapters": ("mine: holds the model of a finished run; give another --output_dir, ...", [],
                                       {"OUTPUT_DIR": "mine", "files": {"mine/adapter/adapter_config.json": "{}"}}),
    "a path as the job's id": ("JOB_ID: '../../outside' cannot name files; ...", [], {"JOB_ID": "../../outside"}),
    "a truncated record of this job": ("results/7.json: is not a valid run record (...); ...",
                                       [], {"files": {"results/7.json": '{"status": "comp'}}),
    "a model without a plan": ("--tensor_parallel: transformers has no tensor parallel plan for BloomForCausalLM; ...",
                               ["--tensor_parallel", 2, "--save_strategy", "no"], {"ranks": 2}),
    "nothing to resume from": ("--resume_from_checkpoint: no complete checkpoint in output/7 (incomplete: none); ...",
                               ["--resume_from_checkpoint"], {"code": 4}),
    # This needs a new process, because datasets reads the variable at import
    "a cache that cannot be written": ("...cache: File exists; check the path and its permissions; HF_HOME ...", [],
                                       {"files": {"cache": ""}, "launcher": "python", "HF_DATASETS_CACHE": "cache",
                                        "code": 3}),
    "a folder below a file": ("...mine: cannot be written; give another --output_dir",
                              [], {"files": {"mine": ""}, "OUTPUT_DIR": "mine/new", "code": 3}),
}
# fmt: on


@pytest.mark.promise("reliability 15")
@pytest.mark.parametrize(("line", "words", "options"), REFUSED.values(), ids=REFUSED)
def test_an_input_error_is_one_line_and_writes_nothing(bench: Bench, line, words, options):
    files = options.get("files", {})
    for path, content in files.items():
        bench.write(path, content)
    bench.refuses(line, *words, **{name: value for name, value in options.items() if name != "files"})


def test_a_temporary_folder_with_too_long_a_name_for_data_loader_workers(bench: Bench, tmp_path):
    """The workers' socket paths would be too long, and the run would wait for the workers for ever."""
    long = tmp_path / ("x" * 76)
    long.mkdir()
    line = f"TMPDIR: {long} has {len(str(long))} characters, and DATA_WORKERS needs at most 75; ..."
    # This needs a new process, because Python looks for the folder only once, and the server has already done so
    bench.refuses(line, DATA_WORKERS=2, TMPDIR=long, launcher="python")


@pytest.mark.parametrize("size", [16, pytest.param(200, marks=pytest.mark.faults)])
def test_a_full_cache_is_one_error_line_that_names_the_cache(bench: Bench, size):
    """A disk of 16 KiB is full when the file has been read, and a disk of 200 KiB when its questions are tokenised."""
    with bench.small_disk("cache", size * 2**10):
        ended = bench.run(launcher="python", HF_DATASETS_CACHE="cache", code=3, TRAIN_SIZE=64, EVAL_SIZE=64)
        assert ended.error.startswith("cache: No space left on device; "), ended


def test_a_machine_without_a_compiler_is_one_error_line(bench: Bench):
    # This needs a new process, because PyTorch reads the variables at import
    none = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": bench.folder.parent / "compiled"}
    line = "--torch_compile: inductor cannot compile on ...; ..."
    bench.refuses(line, "--torch_compile", code=3, launcher="python", **none)


@pytest.mark.promise("no compiler for DeepSpeed")
def test_the_workshops_deepspeed_configs_need_no_compiler(bench: Bench, tmp_path):
    """DeepSpeed must not even call the compiler to check its extensions."""
    compiler = program(tmp_path / "bin", "c++", f"touch '{tmp_path}/asked'; exit 1")
    bench.run("--deepspeed", "ds_configs/zero2_cpu_offload.json", launcher="python", CC=compiler, CXX=compiler)
    assert not (tmp_path / "asked").exists()


@pytest.mark.promise("no compiler for DeepSpeed")
def test_deepspeed_compiles_its_optimizer_without_torch_adam(bench: Bench, tmp_path):
    """DeepSpeed finds ninja in the environment's bin, even if the environment is not active. The compiler is a stub."""
    content = json.loads((REPOSITORY / "ds_configs/zero1.json").read_text())
    for key in ("torch_adam", "fused"):
        del content["optimizer"]["params"][key]
    bench.write("own.json", json.dumps(content))
    works = f"""case "$*" in *" -c "*fused_adam*) touch '{tmp_path}/works'; exit 1 ;; esac"""
    own = {"CXX": program(tmp_path / "bin", "c++", works), "TORCH_EXTENSIONS_DIR": tmp_path / "new", "PATH": os.defpath}
    ended = bench.run("--deepspeed", "own.json", code=1, launcher="python", **own)
    assert "Error building extension 'fused_adam'" in ended.err
    assert (tmp_path / "works").exists()


def test_long_texts_are_counted_and_all_rows_that_were_left_out_are_listed(bench: Bench):
    """Chinese text has no blanks. Both parts have rows that cannot be used, and the log has only the first of them."""
    paragraphs = []
    for number in range(10):
        answer = {"text": str(number), "answer_start": 0}
        question = {"id": str(number), "question": "What is it?", "answers": [answer]}
        paragraphs.append({"context": f"{number}分布式训练把模型放到多个处理器上。" * 40, "qas": [question]})
    paragraphs.append({"context": "a", "qas": [{"question": "Where?", "answers": ["nowhere"]}] * 12})
    bench.write("a.json", json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    text = paragraphs[0]["context"]
    bench.write("b.csv", f"context,question,answer\n{text},What?,0\n{text},What is it?,0\n{text},Where?,nowhere\n")
    ended = bench.run("--dataset", "a.json", "--eval_dataset", "b.csv", MAX_LENGTH=128, BAD_ROWS="skip")
    assert ended.record["questions_cut"] == {"train": 4, "eval": 2}
    assert "4 of 4 training questions were cut to --max_length" in ended.out
    assert "rows left out: 13, all listed in results/7_left_out.txt\n" in ended.out
    listed = [*(f"a.json: data[0].paragraphs[10].qas[{number}]" for number in range(12)), "b.csv: row 4"]
    assert (ended.folder / "results/7_left_out.txt").read_text() == "".join(
        f"{place}: the passage does not contain the answer 'nowhere'\n" for place in listed
    )


def update_json(path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.promise("model folders run no code")
def test_code_of_a_known_model_is_not_run(bench: Bench):
    """The configs of model and tokenizer name code, although transformers has a class for both."""
    folder = bench.trained().output.rename(bench.folder / "mine")
    update_json(folder / "config.json", auto_map=CODE, trust_remote_code=True)
    update_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
    (folder / "evil.py").write_text("import os\nos.mkdir('canary')\n")
    allowed = dict.fromkeys(("TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"), 1)
    assert bench.run("--model_name", "mine", JOB_ID="8", **allowed).record["status"] == "completed"
    assert not (bench.folder / "canary").exists()


@pytest.mark.parametrize(("layers", "number"), [(3, 2), (1, 1)])
def test_missing_and_unused_weights_of_a_model_are_an_error(bench: Bench, layers, number):
    """The weights have two layers. Random weights must not fill a third one, and a second one must not be left out."""
    folder = bench.trained().output.rename(bench.folder / "mine")
    update_json(folder / "config.json", n_layer=layers)
    ended = bench.run("--model_name", "mine", code=2, JOB_ID="8")
    assert f": the weights of mine and its config.json differ in transformer.h.{number}." in ended.error, ended
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 2)
