"""Tests of prefetch.py: it fills the cache on a machine with network, and afterwards a run needs no network.

The Hub is a small server on 127.0.0.1 with random BLOOM models and one data set. All runs are separate commands,
because the libraries read the Hub's address and the cache's folder at import.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from transformers import BloomConfig, BloomForCausalLM

from helpers import REPOSITORY, Finished
from read_questions import read_file
from test_models import small_tokenizer

MODEL, OLD_MODEL, DATASET = "workshop/tiny-hub-bloom", "workshop/old-hub-bloom", "workshop/tiny-hub-squad"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNREACHABLE = "http://127.0.0.1:9"  # nothing listens on the discard port
RUN = {"MODEL_NAME": MODEL, "TRAIN_SIZE": 16, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "MAX_LENGTH": 512, "PADDING": "longest"}


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hub's API that snapshot_download and load_dataset use. `root` holds models/ and datasets/."""

    root: Path

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = self.find_content(unquote(urlparse(self.path).path))
        content = b"{}" if found is None else found
        self.send_response(404 if found is None else 200)
        if found is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_GET

    def find_content(self, path: str) -> bytes | None:
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+/?(.*))?", path)
        if api and (self.root / api[1] / api[2]).is_dir():
            files = self.list_files(self.root / api[1] / api[2], api[4] or "")
            repository = {"id": api[2], "sha": COMMIT, "siblings": files, "tags": [], "private": False, "gated": False}
            return json.dumps({"tree": files, "paths-info": []}.get(api[3], repository)).encode()
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        target = self.root / (file[1] or "models") / file[2] / file[3] if file else self.root
        return target.read_bytes() if target.is_file() else None

    def list_files(self, repository: Path, folder: str) -> list[dict]:
        paths = {str(file.relative_to(repository)): file for file in sorted((repository / folder).rglob("*"))}
        return [
            {"type": "file", "path": name, "rfilename": name, "size": file.stat().st_size, "oid": COMMIT}
            for name, file in paths.items()
            if file.is_file()
        ]

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Address of the stub for the Hub."""
    root = tmp_path_factory.mktemp("hub")
    tokenizer = small_tokenizer(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(root / "models" / MODEL)
    tokenizer.save_pretrained(root / "models" / MODEL)
    (root / "models" / OLD_MODEL).mkdir()
    for copy in (f"{MODEL}/flax_model.msgpack", f"{MODEL}/pytorch_model.bin", f"{OLD_MODEL}/pytorch_model.bin"):
        (root / "models" / copy).write_bytes(b"0" * 1000)
    write_dataset(root / "datasets" / DATASET)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (FakeHub,), {"root": root}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def write_dataset(folder: Path) -> None:
    """Write rows with the columns of the Hub's squad."""
    folder.mkdir(parents=True)
    rows = read_file(str(REPOSITORY / "data" / "squad_sample.json")).examples
    for row in rows:
        row["answers"] = {"text": row["answers"], "answer_start": [0] * len(row["answers"])}
    for split, part in (("train", rows[:40]), ("validation", rows[40:50])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))


@pytest.fixture(scope="module")
def prefetch(train, hub) -> Callable[..., Finished]:
    def run(name: str, home: Path, *words: object, **options: object) -> Finished:
        there = {"HF_ENDPOINT": hub, "HF_HOME": home, "HF_HUB_OFFLINE": "unset"}
        return train(name, *words, script="scripts/prefetch.py", **there, **options)

    return run


def test_a_prefetched_run_needs_no_network(train, prefetch, workplace, tmp_path: Path):
    home = tmp_path / "login node"
    (workplace / DATASET).mkdir(parents=True)  # a folder of this name must not replace the data set
    prefetch("prefetch", home, "--model_name", MODEL, "--dataset", DATASET)
    assert list(home.rglob(f"snapshots/{COMMIT}/*.safetensors"))
    assert not list(home.rglob("*.msgpack"))
    assert not list(home.rglob("*.bin")), "prefetch.py must not fetch a second copy of the weights"
    nowhere = {"HF_ENDPOINT": UNREACHABLE, "HF_HUB_OFFLINE": "unset"}
    trained = train("from_the_cache", HF_HOME=home, **RUN | {"DATASET": DATASET} | nowhere)
    assert trained.record["status"] == "completed"
    assert trained.record["settings"]["model_name"] == MODEL
    assert (trained.output / "model.safetensors").exists()
    assert "using only the local cache" in trained.log


def test_weights_in_an_older_format_are_fetched(prefetch, tmp_path: Path):
    prefetch("old", tmp_path, "--model_name", OLD_MODEL)
    assert list(tmp_path.rglob("snapshots/*/pytorch_model.bin"))


def test_prefetch_rejects_an_unknown_name(prefetch, tmp_path: Path):
    refused = prefetch("unknown", tmp_path, "--model_name", "workshop/no-such-model", code=2)
    assert refused.error.startswith("--model_name: workshop/no-such-model cannot be loaded (")


OFFLINE = (
    "--model_name: NAME is neither a local path nor in the cache, and there is no network: {}; on a login node run: "
    "python scripts/prefetch.py --model_name NAME (it takes --model_name and --dataset together)"
).replace("NAME", "bigscience/bloom-560m")
REFUSED = "127.0.0.1 ({}) cannot be reached ([Errno 111] Connection refused)"
NETWORK_FAULTS = {
    "no network": ({"HF_ENDPOINT": UNREACHABLE}, OFFLINE.format(REFUSED.format("HF_ENDPOINT"))),
    "a closed proxy": pytest.param(
        {"HTTPS_PROXY": UNREACHABLE}, OFFLINE.format(REFUSED.format("HTTPS_PROXY")), marks=pytest.mark.faults
    ),
    "a proxy that refuses": (
        {"HTTPS_PROXY": "HUB"},
        "--model_name: bigscience/bloom-560m cannot be loaded from the Hub (...501 Unsupported method ('CONNECT')); "
        "check HTTPS_PROXY, ALL_PROXY and HF_ENDPOINT",
    ),
    "the network is switched off": pytest.param(
        {"HF_HUB_OFFLINE": "1"}, OFFLINE.format("HF_HUB_OFFLINE is set"), marks=pytest.mark.faults
    ),
}


@pytest.mark.parametrize(("variables", "line"), NETWORK_FAULTS.values(), ids=NETWORK_FAULTS)
def test_a_network_fault_is_one_line_that_names_the_variable(train, hub, tmp_path: Path, variables: dict, line: str):
    nowhere = {"HF_HOME": tmp_path / "empty", "HF_HUB_OFFLINE": "unset", "no_proxy": "", "NO_PROXY": ""}
    given = {name: value.replace("HUB", hub) for name, value in variables.items()}
    refused = train("offline", "--model_name", "bigscience/bloom-560m", code=3, **nowhere | given)
    beginning, _, end = line.partition("...")
    assert refused.error.startswith(beginning) and refused.error.endswith(end), refused
    assert not refused.record_path.exists()
