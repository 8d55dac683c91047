"""The table of runs: each is executed once per session, and examined by as many tests as need it.

A test names its run with ``@uses("zero2")`` and gets it as the argument `run`; other runs of the table come from
`table("plain")`. A run that no row has is a call of `train`. Both fork from the server of tests/server.py, where a
training takes seconds; what must be a command of its own names its launcher.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from bench import Bench, Server
from helpers import RUN_TIMEOUT, TINY, Finished
from runs import RUNS


@pytest.fixture(scope="session")
def bench(server: Server, tmp_path_factory) -> Iterator[Bench]:
    """The folder in which all runs of this session are started."""
    folder = tmp_path_factory.mktemp("runs") / "work place"  # with a space, as users have them
    bench = Bench(server, folder, TINY, RUN_TIMEOUT)
    sizes = {"model_type": "bloom", "vocab_size": 4096, "hidden_size": 512, "n_layer": 3, "n_head": 8}
    bench.write("bloom-12m/config.json", json.dumps(sizes | {"use_cache": False}))
    # 4 heads of queries and 2 of keys and values; the head of the model is its embedding
    sizes = {"model_type": "qwen2", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    bench.write("my-qwen/config.json", json.dumps(sizes | {"tie_word_embeddings": True}))
    yield bench
    left = bench.close()
    assert not left, f"processes outlived the tests: {left}"


@pytest.fixture(scope="session")
def workplace(bench: Bench):
    return bench.folder


@pytest.fixture(scope="session")
def train(bench: Bench) -> Callable[..., Finished]:
    """``train(name, *words, code=0, ranks=0, patch="", **variables)``: a tiny training under this job id, to its end.

    patch: lines of Python that are run before train.py. Other options are those of `Bench.start`.
    """

    def run(name: str, *words: object, patch: str = "", **options: object) -> Finished:
        if patch:
            options["script"] = bench.patched(patch, f"{name}.py")
        return bench.run(*words, **{"JOB_ID": name} | options)

    return run


@pytest.fixture(scope="session")
def table(train) -> Callable[[str], Finished]:
    """``table(name)`` is that run, which must have ended with exit code 0."""
    done: dict[str, Finished] = {}

    def result(name: str) -> Finished:
        if name not in done:
            row = RUNS[name]
            how = {"script": row.script, "ranks": row.ranks, "launcher": row.launcher} | row.settings
            done[name] = train(name, *row.arguments, **how)
        return done[name]

    return result


@pytest.fixture
def run(request, table) -> Finished:
    return table(request.param)
