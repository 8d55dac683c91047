"""Check the gaps of exercises/data_parallel.py, each with two processes: right, open, wrong (and why), or hanging.

    python exercises/check.py
    python exercises/check.py exercises/solution/data_parallel.py      # any file with these functions

The exit code is 0 when all six are right.
"""

import argparse
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).resolve().parent
WORLD = 2
PATIENCE = 20  # seconds for a gap, in which nothing takes one
processes = multiprocessing.get_context("fork")  # PyTorch is imported once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "data_parallel.py")
    arguments = parser.parse_args()
    if not arguments.file.is_file() or arguments.file.suffix != ".py":
        parser.error(f"{arguments.file}: there is no such Python file; leave it out for exercises/data_parallel.py")
    exercise = load(arguments.file)
    results = [verdict(check, exercise) for check in (joins, divides, starts_equal, averages, cuts, steps)]
    for number, result in enumerate(results, start=1):
        print(f"gap {number}: {result}")
    sys.exit(any(result != "right" for result in results))


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception:  # a slip of the participant's, in words that Python has for it
        sys.exit(f"{path} cannot be read:\n{traceback.format_exc(limit=-1)}")
    return module


def verdict(check, exercise: ModuleType) -> str:
    """Run a check on two ranks. What the first rank to complain says; a rank that waits is named last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(WORLD):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=on_rank, args=(check, exercise, rank, port, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    said = []
    for rank, (_, pipe) in enumerate(ranks):
        # the others wait for one that has complained, and need not be waited for
        patience = 1 if any(text != "right" for text in said) else PATIENCE
        try:
            said.append(pipe.recv() if pipe.poll(patience) else f"rank {rank} waits and never ends: {HANGS}")
        except EOFError:
            said.append(f"wrong: rank {rank} ended without a word")
    for process, _ in ranks:
        process.kill()
    complaints = sorted((text for text in said if text != "right"), key=lambda text: "waits" in text)
    return complaints[0] if complaints else "right"


HANGS = "do all ranks call the same collectives, in the same order?"


def on_rank(check, exercise: ModuleType, rank: int, port: str, pipe) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    if check not in (joins, divides, cuts):
        dist.init_process_group("gloo")
    try:
        check(exercise, rank)
        pipe.send("right")
    except NotImplementedError as error:
        pipe.send(f"open ({error})")
    except AssertionError as error:
        pipe.send(f"wrong: on rank {rank} {error}")
    except Exception as error:
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == exercise.__file__]
        where = f"line {theirs[-1].lineno}" if theirs else "with what your function returns"
        pipe.send(f"wrong: {type(error).__name__} on rank {rank}, {where}: {error}")
    signal.pause()  # until verdict() has heard all ranks: who leaves breaks the others' connections


def joins(exercise: ModuleType, rank: int) -> None:
    found = exercise.join()
    assert dist.is_initialized(), "there is no process group"
    assert dist.get_backend() == "gloo", f"the backend is {dist.get_backend()}"
    assert found == (rank, WORLD), f"join() returns {found}, not {(rank, WORLD)}"


def divides(exercise: ModuleType, rank: int) -> None:
    batch = torch.arange(12.0).reshape(6, 2)
    parts = [exercise.own_rows(batch, each, WORLD) for each in range(WORLD)]
    assert all(part.shape == (3, 2) for part in parts), f"the shapes are {[tuple(part.shape) for part in parts]}"
    rows = sorted(row for part in parts for row in part.tolist())
    assert rows == batch.tolist(), f"the rows of all ranks together are {rows}"


def starts_equal(exercise: ModuleType, rank: int) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    exercise.start_equal(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), f"{name} is not rank 0's"


def averages(exercise: ModuleType, rank: int) -> None:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + 2.0 * rank)
    exercise.average_gradients(model, WORLD)
    for name, parameter in model.named_parameters():
        found = parameter.grad.flatten()[0].item()
        assert torch.all(parameter.grad == 2), (
            f"the mean of 1 and 3 should be 2, and the gradient of {name} has {found:g}"
        )


def cuts(exercise: ModuleType, rank: int) -> None:
    row = torch.arange(8.0)
    found = exercise.own_part(row, rank, WORLD).tolist()
    expected = row.tolist()[4 * rank : 4 * rank + 4]
    assert found == expected, f"the part of {row.tolist()} is {found}"


def steps(exercise: ModuleType, rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    whole = nn.Linear(3, 3)
    whole.load_state_dict(model.state_dict())
    adam = torch.optim.Adam(whole.parameters(), lr=0.1)
    zero = exercise.ZeRO1(model, rank, WORLD, learning_rate=0.1)
    for step in range(3):
        for parameter, same in zip(model.parameters(), whole.parameters(), strict=True):
            same.grad = torch.randn(same.shape)
            parameter.grad = same.grad.clone()
        adam.step()
        zero.step()
        for name, weight in model.named_parameters():
            close = torch.allclose(weight, whole.get_parameter(name), atol=1e-6)
            assert close, f"{name} is not what Adam makes of it, in step {step + 1}"
    kept = sum(value.numel() for state in zero.adam.state.values() for value in state.values() if value.dim())
    assert kept == 12, f"Adam keeps {kept} numbers, where the two moments of half of 12 parameters are 12"


if __name__ == "__main__":
    main()
