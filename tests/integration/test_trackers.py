"""Weights & Biases offline on two ranks, read back from the files it leaves."""

import importlib.util
import struct
from pathlib import Path

import pytest

from helpers import Finished
from runs import uses

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
BLOCK = 32768


def records(path: Path):
    """Payloads of a .wandb file: LevelDB's log format (blocks, records in parts) behind a header of 7 bytes."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@uses("wandb")
def test_offline_run_holds_the_documents_names(run: Finished):
    from wandb.proto import wandb_internal_pb2

    files = list((run.folder / "wandb" / run.job_id / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1, "one run, of rank 0"
    summary, name = {}, ""
    for payload in records(files[0]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.WhichOneof("record_type") == "summary":
            summary |= {item.key: item.value_json for item in record.summary.update}
        if record.WhichOneof("record_type") == "run":
            name = record.run.display_name
    assert name == f"tracked-{run.job_id}"
    means = run.record["callbacks"]
    # without a GPU the memory and utilisation of the process take the place of the GPU's
    names = {"avg_cpu_util_%", "std_cpu_util_%", "avg_process_mem_MB"}
    names |= {"train/samples_per_second_mean", "train/steps_per_second_mean"}
    assert names == set(means)
    assert {key: float(summary[key]) for key in names} == means
    assert f"wandb sync wandb/{run.job_id}/wandb/offline-run-*" in run.log
