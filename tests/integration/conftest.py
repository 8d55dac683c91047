"""Fixtures of the table of runs. Each run of the table is executed once per session and can serve several tests.

A test names its run with ``@uses("zero2")`` and gets the run as the argument `run`. It gets other runs of the table
from `table("plain")`, and it starts a run outside the table with `train`. These runs fork from the server of
tests/server.py, where a training run takes seconds. A run that must be a separate command names its launcher.
"""

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

# pytest finds these fixtures by their names in this module
from fixtures import main_of, refusal  # noqa: F401
from helpers import REPOSITORY, RUN_TIMEOUT, TINY, Finished
from runs import RUNS
from workbench import Bench, Server


@pytest.fixture(scope="session")
def bench(server: Server, tmp_path_factory) -> Iterator[Bench]:
    """The folder in which all runs of this session are started."""
    folder = tmp_path_factory.mktemp("runs") / "work place"  # users' paths may hold a space
    bench = Bench(server, folder, TINY, RUN_TIMEOUT)
    sizes = {"model_type": "bloom", "vocab_size": 4096, "hidden_size": 512, "n_layer": 3, "n_head": 8}
    bench.write("bloom-12m/config.json", json.dumps(sizes | {"use_cache": False}))
    zero2 = json.loads((REPOSITORY / "ds_configs/zero2.json").read_text())
    bench.write("zero2.json", json.dumps({key: value for key, value in zero2.items() if key != "optimizer"}))
    # A Qwen2 with 4 query heads and 2 key and value heads. Its output layer shares the embedding's weights.
    sizes = {"model_type": "qwen2", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    bench.write("my-qwen/config.json", json.dumps(sizes | {"tie_word_embeddings": True}))
    bench.write("my-llama/config.json", json.dumps(sizes | {"model_type": "llama"}))  # its output layer has own weights
    # A Mixtral, in which 2 of 4 experts compute each token
    sizes |= {"model_type": "mixtral", "num_local_experts": 4}
    bench.write("my-mixtral/config.json", json.dumps(sizes))
    bench.write("chat.jsonl", "".join(f"{json.dumps(row)}\n" for row in make_chats()))
    yield bench
    left = bench.close()
    assert not left, f"processes outlived the tests: {left}"


def make_chats() -> Iterator[dict]:
    """Yield conversations of two questions of the sample, each about one passage."""
    articles = json.loads((REPOSITORY / "data" / "squad_sample.json").read_text())["data"]
    for asked in [passage["qas"] for article in articles for passage in article["paragraphs"]]:
        for two in itertools.pairwise(asked):
            turns = [(("user", each["question"]), ("assistant", each["answers"][0]["text"])) for each in two]
            yield {"messages": [{"role": role, "content": text} for turn in turns for role, text in turn]}


@pytest.fixture(scope="session")
def workplace(bench: Bench):
    return bench.folder


@pytest.fixture(scope="session")
def train(bench: Bench) -> Callable[..., Finished]:
    """``train(name, *words, code=0, ranks=0, patch="", **variables)`` runs a tiny training run with the job id `name`.

    patch: lines of Python that run before train.py. The other options are those of `Bench.start`.
    """

    def run(name: str, *words: object, patch: str = "", **options: object) -> Finished:
        if patch:
            options["script"] = bench.patched(patch, f"{name}.py")
        return bench.run(*words, **{"JOB_ID": name} | options)

    return run


@pytest.fixture(scope="session")
def table(train) -> Callable[[str], Finished]:
    """``table(name)`` returns this run, which must end with exit code 0."""
    done: dict[str, Finished] = {}

    def result(name: str) -> Finished:
        if name not in done:
            row = RUNS[name]
            if row.base:
                result(row.base)
            how = {"script": row.script, "ranks": row.ranks, "launcher": row.launcher} | row.settings
            done[name] = train(name, *row.arguments, **how)
        return done[name]

    return result


@pytest.fixture
def run(request, table) -> Finished:
    return table(request.param)
