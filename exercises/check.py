"""Check the gaps of an exercise, each with several processes: right, open, wrong (and why), or hanging.

    python exercises/check.py                                    # those of exercises/data_parallel.py
    python exercises/check.py exercises/pipeline.py
    python exercises/check.py exercises/solution/pipeline.py     # any file with these functions

The exit code is 0 when all are right.
"""

import argparse
import importlib.util
import itertools
import math
import multiprocessing
import operator
import os
import signal
import socket
import sys
import traceback
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

# The exercises run on the CPU, so hide GPUs before torch is imported. In torch 2.13 each Optimizer.step asks for the
# current CUDA stream, which starts CUDA. This is slow, and a GPU in exclusive-process mode rejects the second rank.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).resolve().parent
WORLD = 2  # ranks, for the gaps of data_parallel.py
PATIENCE = 20  # seconds for a gap, in which nothing takes one
processes = multiprocessing.get_context("fork")  # PyTorch is imported once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "data_parallel.py")
    arguments = parser.parse_args()
    if not arguments.file.is_file() or arguments.file.suffix != ".py":
        parser.error(f"{arguments.file}: there is no such Python file; leave it out for exercises/data_parallel.py")
    exercise = load(arguments.file)
    is_pipeline = hasattr(exercise, "own_layers")
    results = []
    for number, (check, world) in enumerate((PIPELINE if is_pipeline else DATA_PARALLEL).items(), start=1):
        results.append(verdict(check, exercise, world))
        print(f"gap {number}: {results[-1]}", flush=True)
    if is_pipeline and set(results) == {"right"}:
        for world in (2, 3, 4):
            results.append(verdict(equals_one_process, exercise, world))
            print(f"losses and gradients on {world} ranks: {results[-1]}", flush=True)
    sys.exit(set(results) != {"right"})


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception:  # a slip of the participant's, in words that Python has for it
        sys.exit(f"{path} cannot be read:\n{traceback.format_exc(limit=-1)}")
    return module


def verdict(check, exercise: ModuleType, world: int) -> str:
    """Run a check on some ranks. What a rank complains of, or that one waits and never ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    ranks = {}  # of each pipe on which somebody has still to be heard
    for rank in range(world):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=on_rank, args=(check, exercise, rank, world, port, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        ranks[ours] = rank
    result = "right"
    while ranks and result == "right":
        heard = wait(ranks, timeout=PATIENCE)
        if not heard:
            result = f"rank {min(ranks.values())} waits and never ends: {HANGS}"
        for pipe in heard:
            rank = ranks.pop(pipe)
            try:
                said = pipe.recv()
            except EOFError:
                said = f"wrong: rank {rank} ended without a word"
            if said != "right":
                result = said
    for process in started:
        process.kill()
    return result


HANGS = "do all ranks call the same collectives, in one order? Or do two send to each other, and none receives?"


def on_rank(check, exercise: ModuleType, rank: int, world: int, port: str, pipe) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


# exercises/data_parallel.py


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


# Each gap's check, and on how many ranks
DATA_PARALLEL = dict.fromkeys((joins, divides, starts_equal, averages, cuts, steps), WORLD)


# exercises/pipeline.py


def cuts_layers(exercise: ModuleType, rank: int) -> None:
    whole = exercise.whole_model()
    for world in (2, 3, 4):
        stages = [exercise.own_layers(whole, each, world) for each in range(world)]
        assert all(isinstance(stage, nn.Sequential) for stage in stages), "a stage is not an nn.Sequential"
        blocks = [sum(isinstance(layer, exercise.Block) for layer in stage) for stage in stages]
        assert blocks == [exercise.BLOCKS // world] * world, f"cut into {world}, the stages have {blocks} blocks"
        layers = [layer for stage in stages for layer in stage]
        same = len(layers) == len(whole) and all(map(operator.is_, layers, whole))
        assert same, f"the layers of {world} stages in a row are not embedding, blocks, head in their order"


def thirds(model: nn.Sequential) -> list[nn.Sequential]:
    return [model[:5], model[5:9], model[9:]]


def goes_forward(exercise: ModuleType, rank: int) -> None:
    batch = exercise.batch_of(1, 2)
    before, own = thirds(exercise.whole_model())[:rank], thirds(exercise.whole_model())[rank]
    expected_inputs = nn.Sequential(*before)(exercise.inputs_of(batch[1])).detach()
    expected = own(expected_inputs)
    stage = exercise.Stage(own, rank, 3)
    watch_measuring(stage)
    stage.forward(1, batch)
    assert 1 in stage.kept, "self.kept has no micro batch 1"
    inputs, outputs = stage.kept[1]
    close = inputs.shape == expected_inputs.shape and torch.allclose(inputs, expected_inputs, atol=1e-5)
    assert close, "the inputs of micro batch 1 are not " + ("what the stage before sends" if rank else "its numbers")
    assert rank == 0 or inputs.requires_grad, "the inputs will have no gradient: they need requires_grad_()"
    if rank == 2:
        expected = exercise.loss_of(expected, batch[1]) / 2
        assert outputs.shape == (), f"the last stage keeps outputs of the shape {tuple(outputs.shape)}, not the loss"
        assert torch.allclose(outputs, expected), (
            f"the loss is {outputs.item():.4f}, where half of micro batch 1's own, as there are two, is {expected:.4f}"
        )
    assert torch.allclose(outputs, expected, atol=1e-5), "the outputs are not what the layers make of the inputs"
    assert outputs.requires_grad, "the kept outputs are detached, and cannot go backward"
    wait_until_sent(stage)


def goes_backward(exercise: ModuleType, rank: int) -> None:
    batch = exercise.batch_of(1, 2)
    whole = exercise.whole_model()
    (exercise.loss_of(whole(exercise.inputs_of(batch[0])), batch[0]) / 2).backward()
    stage = exercise.Stage(thirds(exercise.whole_model())[rank], rank, 3)
    watch_measuring(stage)
    stage.forward(0, batch)
    stage.backward(0)
    wait_until_sent(stage)
    assert not stage.kept, "self.kept still has the micro batch"
    compare_gradients(stage.layers, thirds(whole)[rank])


def watch_measuring(stage) -> None:
    """Reject a stage that waits for a message while it is measured, or computes while it is not."""
    measured, receive, busy = stage.measured, stage.receive, []

    @contextmanager
    def watched(what: str, micro: int):
        busy.append(what)
        with measured(what, micro):
            yield
        busy.clear()

    def received(other: int) -> torch.Tensor:
        assert not busy, f"it receives inside `measured`, so that waiting counts as {busy[0]}"
        return receive(other)

    def computes(what: str) -> None:
        assert busy == [what], f'the {what} pass runs outside `measured("{what}", micro)`, so its time does not count'

    stage.measured, stage.receive = watched, received
    first = stage.layers[0]
    first.register_forward_pre_hook(lambda *_: computes("forward"))
    next(first.parameters()).register_post_accumulate_grad_hook(lambda _: computes("backward"))


def wait_until_sent(stage) -> None:
    for message in stage.sent:  # one that is dropped before may never arrive
        message.wait()


def compare_gradients(layers: nn.Sequential, same_of_whole: nn.Sequential) -> None:
    for (name, own), same in zip(layers.named_parameters(), same_of_whole.parameters(), strict=True):
        assert own.grad is not None, f"{name} has no gradient"
        assert torch.allclose(own.grad, same.grad, atol=1e-6), f"the gradient of {name} is not that of one process"


def orders_gpipe(exercise: ModuleType, rank: int) -> None:
    micro_batches = range(5)
    expected = [(what, micro) for what in ("forward", "backward") for micro in micro_batches]
    compare_orders(exercise.gpipe(rank, 2, 5), expected, f"rank {rank} of 2 with 5 micro batches")


def orders_1f1b(exercise: ModuleType, rank: int) -> None:
    for world, micro_batches in ((2, 3), (4, 8), (4, 2)):
        for each in range(world):
            expected, done = [], {"forward": 0, "backward": 0}
            while done["backward"] < micro_batches:
                kept = done["forward"] - done["backward"]
                has_room = kept < world - each and done["forward"] < micro_batches
                what = "forward" if has_room else "backward"
                expected.append((what, done[what]))
                done[what] += 1
            found = exercise.one_forward_one_backward(each, world, micro_batches)
            compare_orders(found, expected, f"rank {each} of {world} with {micro_batches} micro batches")


def compare_orders(found: list, expected: list, whose: str) -> None:
    for place, (one, other) in enumerate(itertools.zip_longest(found, expected, fillvalue="nothing"), start=1):
        assert one == other, f"{whose} has {one} in place {place}, where {other} belongs"


def sends(exercise: ModuleType, rank: int) -> None:
    stage = exercise.Stage(nn.Sequential(), rank, 2)
    shape = (exercise.ROWS, exercise.TOKENS, exercise.WIDTH)
    stage.send(torch.full(shape, float(rank)), 1 - rank)
    found = stage.receive(1 - rank)  # both ranks have begun to send
    assert torch.all(found == 1 - rank), f"what the other rank has sent arrives as {found.flatten()[0]}"
    assert stage.sent, "self.sent is empty: nobody waits for the message at the end"
    wait_until_sent(stage)


def equals_one_process(exercise: ModuleType, rank: int) -> None:
    world = dist.get_world_size()
    exercise.SECONDS = dict.fromkeys(exercise.SECONDS, 0.0)
    for name, schedule in exercise.SCHEDULES.items():
        for micro_batches in (1, 6):
            batch = exercise.batch_of(1, micro_batches)
            whole = exercise.whole_model()
            expected = exercise.by_one_process(whole, batch)
            stage = exercise.Stage(exercise.own_layers(exercise.whole_model(), rank, world), rank, world)
            loss = exercise.by_stages(stage, schedule(rank, world, micro_batches), batch)
            same = rank < world - 1 or math.isclose(loss, expected, rel_tol=1e-5)
            assert same, f"{name}'s loss of {micro_batches} micro batches is {loss:.6f}, not {expected:.6f}"
            compare_gradients(stage.layers, exercise.own_layers(whole, rank, world))


PIPELINE = {cuts_layers: 1, goes_forward: 3, goes_backward: 3, orders_gpipe: 2, orders_1f1b: 1, sends: 2}


if __name__ == "__main__":
    main()
