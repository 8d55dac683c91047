"""Check the gaps of an exercise with several processes. Each gap is right, open, wrong (with the reason), or hangs.

    python exercises/check.py                                    # checks exercises/data_parallel.py
    python exercises/check.py exercises/shard.py
    python exercises/check.py exercises/pipeline.py
    python exercises/check.py exercises/ring.py
    python exercises/check.py exercises/solution/pipeline.py     # any file with the same functions

A gap that nobody has touched is open. If a gap has several functions, its line names the open ones. If a gap needs
another gap that is open, its line names that gap. The exit code is 0 when all gaps are right.
"""

import argparse
import ast
import importlib.util
import itertools
import math
import multiprocessing
import operator
import os
import re
import signal
import socket
import sys
import traceback
from collections import Counter
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
WORLD = 2  # ranks for the gaps of data_parallel.py and shard.py
TIMEOUT = 20  # seconds; a check takes less than one second if nothing hangs
processes = multiprocessing.get_context("fork")  # forked processes need not import PyTorch again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "data_parallel.py")
    arguments = parser.parse_args()
    if not arguments.file.is_file() or arguments.file.suffix != ".py":
        parser.error(
            f"{arguments.file}: there is no such Python file; leave the file out to check exercises/data_parallel.py"
        )
    exercise = load(arguments.file)
    gaps = gap_functions(arguments.file.read_text())
    known = next((name for name in EXERCISES if hasattr(exercise, name)), "join")
    checks, together, title, worlds, ranks, flags, page = EXERCISES[known]

    results = []
    for number, (check, world) in enumerate(checks.items(), start=1):
        functions = gaps.get(number, {})
        still_open = [f"{name}()" for name, is_open in functions.items() if is_open]
        result = "open" if functions and all(functions.values()) else run_check(check, exercise, world)
        results.append(f"open: {', '.join(still_open)}" if result == f"open (gap {number})" else result)
        print(f"gap {number}: {results[-1]}", flush=True)
    if set(results) == {"right"}:
        for world in worlds:
            results.append(run_check(together, exercise, world))
            print(f"{title} on {world} ranks: {results[-1]}", flush=True)
    if set(results) != {"right"}:
        sys.exit(1)
    print(f"All is right. Next, run this command, then continue with {page}:")
    print(f"    OMP_NUM_THREADS=1 torchrun --nproc_per_node={ranks} {arguments.file}{flags}")


def gap_functions(text: str) -> dict[int, dict[str, bool]]:
    """Return the functions of each gap: True for a function with the code with which the exercise begins."""
    gaps = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            gap = re.match(r"Gap (\d)", ast.get_docstring(function) or "")
            code = [ast.unparse(statement) for statement in function.body[1:]]
            if gap:
                # dist.send is the beginning of gap 6 of the pipeline, which works but hangs with 1F1B
                is_open = code in ([f"raise NotImplementedError('gap {gap[1]}')"], ["dist.send(tensor, other)"])
                gaps.setdefault(int(gap[1]), {})[function.name] = is_open
    return gaps


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception:  # an error of the participant, such as wrong syntax
        reason = traceback.format_exc(limit=-1)
        sys.exit(f"error: {path}: Python cannot load this file; correct it and check again:\n{reason}")
    return module


def solution(name: str) -> ModuleType:
    return load(HERE / "solution" / f"{name}.py")


def run_check(check, exercise: ModuleType, world: int) -> str:
    """Run a check on `world` ranks. Return "right" if all ranks pass, otherwise the message of one that fails."""
    if check in (check_zero1_step, check_reduce_scatter, check_sharded_training):
        # The first optimizer imports modules for seconds. Import them here: on a busy machine, a rank that imports them
        # is reported as hanging.
        torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    pending = {}  # pipe -> rank, for ranks that have not sent their result
    for rank in range(world):
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=run_rank, args=(check, exercise, rank, world, port, sender), daemon=True)
        process.start()
        sender.close()
        started.append(process)
        pending[receiver] = rank
    result = "right"
    while pending and result == "right":
        ready = wait(pending, timeout=TIMEOUT)
        if not ready:
            hint = EXCHANGE_HINT if check in (check_ring, check_ring_attention) else HANG_QUESTIONS
            result = f"hangs: rank {min(pending.values())} still waits after {TIMEOUT} seconds; {hint}"
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                message = pipe.recv()
            except EOFError:
                message = f"wrong: rank {rank}: the process ended without a result"
            if message != "right":
                result = message
    for process in started:
        process.kill()
    return result


HANG_QUESTIONS = (
    "do all ranks call the same collectives in the same order? Do two ranks send to each other while neither receives?"
)
EXCHANGE_HINT = "in exchange(): isend() first, then recv(), then wait() of the object that isend() returned"


def run_rank(check, exercise: ModuleType, rank: int, world: int, port: str, pipe) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    # Gap 1 of data_parallel.py creates the process group itself. The other checks of this list need none.
    if check not in (check_join, check_own_rows, check_own_part, check_shard, check_merge, check_attend_backward):
        dist.init_process_group("gloo")
    try:
        check(exercise, rank)
        pipe.send("right")
    except NotImplementedError as error:
        pipe.send(f"open ({error})")
    except AssertionError as error:
        pipe.send(f"wrong: rank {rank}: {error}")
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == exercise.__file__]
        where = f"in line {frames[-1].lineno}" if frames else "when the check uses the result of your function"
        pipe.send(f"wrong: rank {rank}: {type(error).__name__} {where}: {error}")
    # Wait until run_check() has all results and kills this process. A rank that exits early breaks the other ranks'
    # connections.
    signal.pause()


# exercises/data_parallel.py


def check_join(exercise: ModuleType, rank: int) -> None:
    found = exercise.join()
    assert dist.is_initialized(), "join() has not created a process group"
    assert dist.get_backend() == "gloo", f"the backend is {dist.get_backend()} instead of gloo"
    assert found == (rank, WORLD), f"join() returns {found} instead of {(rank, WORLD)}"


def check_own_rows(exercise: ModuleType, rank: int) -> None:
    batch = torch.arange(12.0).reshape(6, 2)
    parts = [exercise.own_rows(batch, each, WORLD) for each in range(WORLD)]
    shapes = [tuple(part.shape) for part in parts]
    assert shapes == [(3, 2)] * WORLD, f"the shapes of the ranks' parts are {shapes} instead of {[(3, 2)] * WORLD}"
    rows = sorted(row for part in parts for row in part.tolist())
    assert rows == batch.tolist(), f"the rows of all ranks together are {rows} instead of {batch.tolist()}"


def check_start_equal(exercise: ModuleType, rank: int) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    exercise.start_equal(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), f"{name} differs from {name} on rank 0"


def check_average_gradients(exercise: ModuleType, rank: int) -> None:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + 2.0 * rank)
    exercise.average_gradients(model, WORLD)
    for name, parameter in model.named_parameters():
        found = parameter.grad.flatten()[0].item()
        assert torch.all(parameter.grad == 2), (
            f"the mean of the gradients 1 and 3 is 2, but the gradient of {name} is {found:g}"
        )


def check_own_part(exercise: ModuleType, rank: int) -> None:
    row = torch.arange(8.0)
    found = exercise.own_part(row, rank, WORLD).tolist()
    expected = row.tolist()[4 * rank : 4 * rank + 4]
    assert found == expected, f"the part of {row.tolist()} is {found} instead of {expected}"


def check_zero1_step(exercise: ModuleType, rank: int) -> None:
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
            assert close, f"after step {step + 1}, {name} differs from the result of Adam in one process"
    kept = sum(value.numel() for state in zero.adam.state.values() for value in state.values() if value.dim())
    assert kept == 12, f"Adam keeps {kept} numbers instead of 12 (2 moments for each of 6 parameters, half of the 12)"


# check of each gap -> number of ranks
DATA_PARALLEL = dict.fromkeys(
    (check_join, check_own_rows, check_start_equal, check_average_gradients, check_own_part, check_zero1_step), WORLD
)


# exercises/shard.py


def check_shard(exercise: ModuleType, rank: int) -> None:
    for numbers, world in ((8, 4), (5, 2), (5, 4)):
        flat = torch.arange(1.0, numbers + 1)
        parts = [exercise.shard(flat, each, world) for each in range(world)]
        lengths = [len(part) for part in parts]
        expected = [math.ceil(numbers / world)] * world
        remedy = f"{numbers} is a multiple of {world}, so append no zeros"
        if numbers % world:
            remedy = "before you cut the flat tensor, append zeros, as few as make all parts equally long"
        assert lengths == expected, (
            f"{numbers} numbers on {world} ranks give parts of {lengths} numbers instead of {expected}; {remedy}"
        )
        found = [part.tolist() for part in parts]
        right = [solution("shard").shard(flat, each, world).tolist() for each in range(world)]
        assert found == right, f"the parts of {flat.tolist()} on {world} ranks are {found} instead of {right}"


def make_sharded(exercise: ModuleType, rank: int) -> tuple[nn.Linear, nn.Module, torch.Tensor]:
    """Return a layer of 5 numbers, the same layer sharded, and its padded flat tensor."""
    exercise.shard = solution("shard").shard  # so that a mistake in gap 1 does not fail the other gaps
    torch.manual_seed(0)
    linear = nn.Linear(4, 1)
    flat = torch.cat([linear.weight.detach().flatten(), linear.bias.detach(), torch.zeros(1)])
    return linear, exercise.ShardedLinear(linear, rank, WORLD), flat


@contextmanager
def watched_collectives():
    """Before each collective, check that all ranks call the same one. Yield the list of the names that were called.

    Without this check, ranks that call different collectives wait for each other, and the reason stays unknown.
    """
    names = []
    exchange = dist.all_gather_object

    def compare(call: str) -> None:
        calls = [None] * dist.get_world_size()
        exchange(calls, call)
        assert len(set(calls)) == 1, (
            f"at the same time {', '.join(f'rank {rank} calls {call}' for rank, call in enumerate(calls))}; "
            "all ranks must call the same collectives in the same order"
        )

    def watched(name: str, collective):
        def call(*arguments, **options):
            values = [*arguments, *options.values()]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                assert has_memory(tensor), f"{name} gets a tensor without memory; call allocate() for it first"
                assert not tensor.requires_grad, f"{name} gets a tensor that autograd watches; pass its `.data`"
            if name.endswith("_single"):
                result, given = (tensor.numel() for tensor in tensors)
                assert result == (given * WORLD if name == "all_gather_single" else given // WORLD), (
                    f"{name} stores its result in the first tensor, of {result} numbers; the second has {given} numbers"
                )
            roots = "".join(f" with root {value}" for value in values if type(value) is int)
            numbers = max((tensor.numel() for tensor in tensors), default=0)
            compare(f"{name}{roots} for {numbers} numbers")
            names.append(name)
            return collective(*arguments, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    yield names
    compare("no collective")


COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
)


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def check_gather(exercise: ModuleType, rank: int) -> None:
    linear, layer, flat = make_sharded(exercise, rank)
    whole = layer.whole
    inputs = torch.randn(3, 4, requires_grad=True)
    with watched_collectives():
        outputs = layer.forward(inputs)
    check_parts_and_whole(layer, flat, rank, whole)
    assert isinstance(outputs, torch.Tensor), f"forward() returns {outputs} instead of the outputs"
    assert torch.allclose(outputs, linear(inputs)), (
        "the outputs differ from those of the layer in one process; before self.compute(inputs), self.whole must hold "
        "the parts of all ranks in the order of the ranks"
    )
    assert outputs.requires_grad, (
        "autograd does not know how the outputs were computed, so the layer would get no gradient; leave out .detach() "
        "and torch.no_grad()"
    )
    assert not has_memory(whole), (
        f"after forward() the rank still holds the whole layer, {whole.nbytes} bytes; free self.whole when the outputs "
        "are computed"
    )
    exercise.allocate(whole)
    whole.data.copy_(2 * flat)  # the backward pass must use these weights, not those of the forward pass
    gradients = torch.autograd.grad(outputs.sum(), [inputs, whole], allow_unused=True)
    assert not any(each is None for each in gradients) and torch.allclose(gradients[0], 2 * linear.weight), (
        "the outputs were computed with a copy of self.whole or with its .data, so the backward pass would not use "
        "self.whole; compute them with self.compute(inputs)"
    )


def check_parts_and_whole(layer: nn.Module, flat: torch.Tensor, rank: int, whole: torch.Tensor) -> None:
    assert layer.whole is whole, (
        "self.whole is another tensor than before, which the backward pass will not find; "
        "use allocate(self.whole) and free(self.whole), which keep the tensor"
    )
    assert has_memory(layer.part), (
        "self.part is freed, and no other rank has this part of the weights; free the gathered layer, self.whole"
    )
    assert torch.equal(layer.part.data, solution("shard").shard(flat, rank, WORLD)), (
        "self.part has changed; only Adam may change this rank's part of the weights"
    )


def check_gather_again(exercise: ModuleType, rank: int) -> None:
    _, layer, flat = make_sharded(exercise, rank)
    whole = layer.whole
    weights = whole.detach()  # uses the same memory, like the weights that autograd keeps for the backward pass
    with watched_collectives():
        layer.before_backward()
    check_parts_and_whole(layer, flat, rank, whole)
    assert has_memory(weights), (
        "self.whole has no memory when the backward pass of the layer begins; forward() has freed it, so gather it "
        "again (allocate and all-gather, as in gap 2), and do not free it here"
    )
    assert torch.equal(weights, flat), (
        "self.whole does not contain the parts of all ranks in the order of the ranks; after allocate(), collect them "
        "with all_gather_single"
    )


def check_reduce_scatter(exercise: ModuleType, rank: int) -> None:
    _, layer, flat = make_sharded(exercise, rank)
    whole = layer.whole
    exercise.allocate(whole)
    whole.data.copy_(flat)
    numbers = torch.arange(1.0, 7.0)
    whole.grad = numbers * (1 + 2 * rank)  # the mean over two ranks is twice `numbers`
    with watched_collectives() as names:
        layer.after_backward()
    check_parts_and_whole(layer, flat, rank, whole)
    found = layer.part.grad
    assert found is not None, (
        "self.part has no gradient, so Adam does not update it. Adam must step on the part, because the whole layer is "
        "freed; store the part's mean gradient in self.part.grad"
    )
    mean = solution("shard").shard(2 * numbers, rank, WORLD)
    reason = "it must be this rank's part of the mean over the ranks"
    if torch.allclose(found, mean * WORLD):
        reason = "this is the sum over the ranks; divide it by self.world"
    elif torch.allclose(found, mean / WORLD):
        reason = "this is the sum divided by self.world twice; divide it only once"
    assert torch.allclose(found, mean), (
        f"the gradient of the part is {found.tolist()} instead of {mean.tolist()}: {reason}"
    )
    assert "all_reduce" not in names, (
        "the gradient is right, but an all-reduce sends twice as much as needed, because each rank gets the gradient "
        "of the whole layer; use dist.reduce_scatter_single, which gives each rank only its part"
    )
    assert whole.grad is None, (
        f"self.whole.grad still holds the gradient of the whole layer, {whole.grad.nbytes} bytes, and the next step "
        "would add to it; set it to None when the part has its gradient"
    )
    assert not has_memory(whole), (
        f"after the backward pass the rank still holds the whole layer, {whole.nbytes} bytes; free self.whole"
    )


def check_sharded_training(exercise: ModuleType, rank: int) -> None:
    world = dist.get_world_size()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    layers = [exercise.ShardedLinear(reference[number], rank, world) for number in (0, 2)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    parameters = list(model.parameters())
    assert all(map(operator.is_, parameters, [layer.part for layer in layers])), (
        "model.parameters() are not the parts of the layers; only self.part may be an nn.Parameter, "
        "because Adam updates every nn.Parameter"
    )
    adam, reference_adam = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, reference))
    sent = Counter()
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(dist, name, exercise.count_sent(getattr(dist, name), sent, world))
    for step in (1, 2):
        inputs = torch.randn(16, 8)
        mine = inputs[rank::world]
        expected = sum_loss(reference, mine).item()
        for each, rows, optimizer in ((reference, inputs, reference_adam), (model, mine, adam)):
            loss = sum_loss(each, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert math.isclose(loss.item(), expected, rel_tol=1e-5), (
            f"in step {step} the loss is {loss.item():.6f} instead of {expected:.6f}"
        )
    for layer, linear in zip(layers, (reference[0], reference[2]), strict=True):
        flat = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()])
        assert torch.allclose(layer.part, solution("shard").shard(flat, rank, world), atol=1e-6), (
            "after two steps, the rank's part differs from the weights in one process"
        )
    numbers = sum(len(layer.part) for layer in layers)
    found, expected = exercise.count_held(layers, adam), (4 * numbers, 4 * numbers, 8 * numbers)
    assert found == expected, (
        f"after a step the rank holds {found} bytes of parameters, gradients and Adam's moments instead of {expected}"
    )
    found, expected = sum(sent.values()), 2 * 3 * 4 * numbers * (world - 1)
    assert math.isclose(found, expected), (
        f"in two steps the rank sends {found:.0f} bytes instead of {expected}: "
        "a layer needs two all-gathers and one reduce-scatter in each step"
    )


def sum_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))


SHARD = dict.fromkeys((check_shard, check_gather, check_gather_again, check_reduce_scatter), WORLD)


# exercises/pipeline.py


def check_own_layers(exercise: ModuleType, rank: int) -> None:
    whole = exercise.whole_model()
    for world in (2, 3, 4):
        stages = [exercise.own_layers(whole, each, world) for each in range(world)]
        assert all(isinstance(stage, nn.Sequential) for stage in stages), (
            "a stage is not an nn.Sequential; return a slice of `layers`"
        )
        blocks = [sum(isinstance(layer, exercise.Block) for layer in stage) for stage in stages]
        expected = [exercise.BLOCKS // world] * world
        assert blocks == expected, f"the {world} stages have {blocks} blocks instead of {expected}"
        layers = [layer for stage in stages for layer in stage]
        same = len(layers) == len(whole) and all(map(operator.is_, layers, whole))
        assert same, (
            f"the layers of all {world} stages, one after the other, are not the layers of the model in their order"
        )


def cut_in_three(model: nn.Sequential) -> list[nn.Sequential]:
    return [model[:5], model[5:9], model[9:]]


def check_forward(exercise: ModuleType, rank: int) -> None:
    batch = exercise.make_batch(1, 2)
    before, own = cut_in_three(exercise.whole_model())[:rank], cut_in_three(exercise.whole_model())[rank]
    expected_inputs = nn.Sequential(*before)(exercise.input_tokens(batch[1])).detach()
    expected = own(expected_inputs)
    stage = exercise.Stage(own, rank, 3)
    watch_measured(stage)
    stage.forward(1, batch)
    assert 1 in stage.kept, "self.kept has no micro batch 1"
    inputs, outputs = stage.kept[1]
    close = inputs.shape == expected_inputs.shape and torch.allclose(inputs, expected_inputs, atol=1e-5)
    source = "the message of the previous stage" if rank else "input_tokens(batch[1])"
    assert close, f"the inputs of micro batch 1 differ from {source}"
    assert rank == 0 or inputs.requires_grad, "the inputs will have no gradient; call requires_grad_() on them"
    if rank == 2:
        expected = exercise.compute_loss(expected, batch[1]) / 2
        assert outputs.shape == (), f"the last stage keeps outputs of shape {tuple(outputs.shape)} instead of the loss"
        assert torch.allclose(outputs, expected), (
            f"the loss is {outputs.item():.4f} instead of {expected:.4f}; "
            "divide the loss by the number of micro batches, 2"
        )
    assert torch.allclose(outputs, expected, atol=1e-5), "the outputs differ from self.layers(inputs)"
    assert outputs.requires_grad, (
        "the kept outputs are detached, so they have no backward pass; detach only what you send"
    )
    wait_until_sent(stage)


def check_backward(exercise: ModuleType, rank: int) -> None:
    batch = exercise.make_batch(1, 2)
    whole = exercise.whole_model()
    (exercise.compute_loss(whole(exercise.input_tokens(batch[0])), batch[0]) / 2).backward()
    stage = exercise.Stage(cut_in_three(exercise.whole_model())[rank], rank, 3)
    watch_measured(stage)
    stage.forward(0, batch)
    stage.backward(0)
    wait_until_sent(stage)
    assert not stage.kept, "self.kept still has the micro batch; remove it with self.kept.pop(micro)"
    compare_gradients(stage.layers, cut_in_three(whole)[rank])


def watch_measured(stage) -> None:
    """Make the check fail if the stage receives inside `measured` or computes outside it."""
    measured, receive, busy = stage.measured, stage.receive, []

    @contextmanager
    def watched(what: str, micro: int):
        busy.append(what)
        with measured(what, micro):
            yield
        busy.clear()

    def received(other: int) -> torch.Tensor:
        assert not busy, f"receive() runs inside `measured`, so its waiting time counts as {busy[0]} time"
        return receive(other)

    def computes(what: str) -> None:
        assert busy == [what], f'the {what} pass runs outside `measured("{what}", micro)`, so its time does not count'

    stage.measured, stage.receive = watched, received
    first = stage.layers[0]
    first.register_forward_pre_hook(lambda *_: computes("forward"))
    next(first.parameters()).register_post_accumulate_grad_hook(lambda _: computes("backward"))


def wait_until_sent(stage) -> None:
    for message in stage.sent:  # a message whose handle is dropped early may never arrive
        message.wait()


def compare_gradients(layers: nn.Sequential, reference: nn.Sequential) -> None:
    for (name, own), same in zip(layers.named_parameters(), reference.parameters(), strict=True):
        assert own.grad is not None, f"{name} has no gradient"
        assert torch.allclose(own.grad, same.grad, atol=1e-6), (
            f"the gradient of {name} differs from the gradient in one process"
        )


def check_gpipe(exercise: ModuleType, rank: int) -> None:
    compare_orders(exercise, "gpipe", rank, 2, 5)


def check_1f1b(exercise: ModuleType, rank: int) -> None:
    for world, micro_batches in ((2, 3), (4, 8), (4, 2)):
        for each in range(world):
            compare_orders(exercise, "one_forward_one_backward", each, world, micro_batches)


def compare_orders(exercise: ModuleType, schedule: str, *arguments: int) -> None:
    found, expected = (getattr(module, schedule)(*arguments) for module in (exercise, solution("pipeline")))
    place = "order for rank {} of {} with {} micro batches".format(*arguments)
    for number, (actual, right) in enumerate(itertools.zip_longest(found, expected, fillvalue="nothing"), start=1):
        assert actual == right, f"{place}: entry {number} of the order is {actual} instead of {right}"


def check_send(exercise: ModuleType, rank: int) -> None:
    stage = exercise.Stage(nn.Sequential(), rank, 2)
    shape = (exercise.ROWS, exercise.TOKENS, exercise.WIDTH)
    stage.send(torch.full(shape, float(rank)), 1 - rank)
    found = stage.receive(1 - rank)  # hangs if send() waits for the receiver, because both ranks send first
    assert torch.all(found == 1 - rank), f"rank {1 - rank} sent {1 - rank}, but {found.flatten()[0]} arrived"
    assert stage.sent, "self.sent is empty, so nothing waits for the message at the end of the step"
    wait_until_sent(stage)


def check_training(exercise: ModuleType, rank: int) -> None:
    world = dist.get_world_size()
    exercise.SECONDS = dict.fromkeys(exercise.SECONDS, 0.0)
    for name, schedule in exercise.SCHEDULES.items():
        for micro_batches in (1, 6):
            batch = exercise.make_batch(1, micro_batches)
            whole = exercise.whole_model()
            expected = exercise.run_one_process(whole, batch)
            stage = exercise.Stage(exercise.own_layers(exercise.whole_model(), rank, world), rank, world)
            loss = exercise.run_stages(stage, schedule(rank, world, micro_batches), batch)
            same = rank < world - 1 or math.isclose(loss, expected, rel_tol=1e-5)
            assert same, (
                f"with {name} and {micro_batches} micro batches the loss is {loss:.6f} instead of {expected:.6f}"
            )
            compare_gradients(stage.layers, exercise.own_layers(whole, rank, world))


PIPELINE = {check_own_layers: 1, check_forward: 3, check_backward: 3, check_gpipe: 2, check_1f1b: 1, check_send: 2}


# exercises/ring.py


def compare_shapes(name: str, found: torch.Tensor, right: torch.Tensor) -> None:
    shape, expected = tuple(found.shape), tuple(right.shape)
    assert shape == expected, f"{name} has the shape {shape} instead of {expected}"


def check_merge(exercise: ModuleType, rank: int) -> None:
    torch.manual_seed(0)
    # The scores of each row have two parts, which begin at these numbers. exp(1000) is infinite
    begins = torch.tensor([[0, 1], [1, 0], [0, 1000], [1000, 0], [-1000, -999]], dtype=torch.float64)
    scores, values = begins.repeat_interleave(3, dim=1) + torch.randn(5, 6), torch.randn(6, 2, dtype=torch.float64)
    first = exercise.attend(scores[:, :3], values[:3])
    second = exercise.attend(scores[:, 3:], values[3:])
    merged = exercise.merge(first, second)
    kind = type(merged).__name__
    assert isinstance(merged, exercise.Partial), f"merge() returns a {kind}; return Partial(maximum, total, output)"
    for name, *tensors in zip(merged._fields, merged, first, strict=True):
        compare_shapes(f"{name} of the result of merge()", *tensors)
    complete = scores.softmax(-1) @ values
    assert not torch.allclose(merged.output, complete), (
        "do not divide output by total in merge(); ring_forward() does that at the end"
    )
    right = torch.isclose(merged.output / merged.total, complete).all(dim=1)
    right &= torch.isclose(merged.maximum + merged.total.log(), scores.logsumexp(-1, keepdim=True))[:, 0]
    assert right.all(), explain_merge(merged, first, second, small_is_right=right[:2].all())
    found, expected = exercise.log_sum_exp(second), scores[:, 3:].logsumexp(-1, keepdim=True)
    compare_shapes("the result of log_sum_exp()", found, expected)
    assert not torch.allclose(found, second.total.log()), (
        "log_sum_exp() is without the maximum: total is the sum of exp(score - maximum), so add the maximum to its "
        "logarithm"
    )
    assert found.isfinite().all(), (
        "log_sum_exp() is right for small scores, but exp() of a score of 1,000 is infinite; add the maximum to the "
        "logarithm of total"
    )
    assert torch.allclose(found, expected), f"log_sum_exp() returns {found.flatten()} instead of {expected.flatten()}"


def explain_merge(merged: tuple, first: tuple, second: tuple, *, small_is_right: torch.Tensor) -> str:
    remedy = "multiply total and output of each part by exp(its maximum - new maximum)"
    for name, part in (("first", first), ("second", second)):
        if torch.equal(merged.maximum, part.maximum):
            return (
                f"the new maximum is that of the {name} part only. This is right for small scores, but exp(score - "
                "maximum) is infinite where the other part has a score of 1,000; use torch.maximum()"
            )
    if small_is_right:
        return f"merge() is right for small scores, but exp(1000) is infinite; {remedy}, which is at most 1"
    if len(merged.maximum.unique()) == 1:
        return "all rows get the same maximum; each row needs its own, so use torch.maximum()"
    sums = {"total": first.total + second.total, "output": first.output + second.output}
    added = [name for name, each in sums.items() if torch.allclose(getattr(merged, name), each)]
    if added:
        return f"merge() adds {' and '.join(added)} without rescaling, but the parts have different maxima; {remedy}"
    return f"the softmax of both parts together is wrong; {remedy}, then add them"


def check_ring(exercise: ModuleType, rank: int) -> None:
    for world in (1, 2, 3, 4):
        check_owners(exercise, world)
        for zigzag in (False, True):
            pieces = exercise.Ring(0, world, zigzag=zigzag).pieces
            for own, other in itertools.product(map(pieces, reversed(range(world))), repeat=2):
                check_pairs(exercise.needed_pairs(own, other), own, other)
    world = dist.get_world_size()
    block = torch.full((2, 3), float(rank), dtype=torch.float64)
    following, previous = (rank + 1) % world, (rank - 1) % world
    receive = dist.recv

    def watched(tensor: torch.Tensor, *arguments, **options):
        # PyTorch does not compare what arrives with the tensor
        assert (tensor.shape, tensor.dtype) == (block.shape, block.dtype), (
            f"dist.recv() in exchange() gets a tensor of {tuple(tensor.shape)} and {tensor.dtype} instead of "
            f"{tuple(block.shape)} and {block.dtype}; use torch.empty_like(block)"
        )
        return receive(tensor, *arguments, **options)

    waits, wait_for = [], dist.Work.wait

    def watched_wait(*arguments):
        waits.append(arguments)
        return wait_for(*arguments)

    dist.recv, dist.Work.wait = watched, watched_wait
    found = exercise.exchange(block, following, previous)
    assert torch.all(block == rank), (
        "exchange() has changed the block that it sends; receive into a new tensor, torch.empty_like(block)"
    )
    assert isinstance(found, torch.Tensor), f"exchange() returns {found} instead of the block that it has received"
    assert len(waits) > 1, (
        "exchange() does not wait for the block that it sends, which may never arrive; after recv(), call wait() of "
        "the object that isend() returned"
    )
    names = {rank: "its own block", following: "the block of the rank `following`"}
    assert torch.all(found == previous), (
        f"exchange() returns {names.get(found.flatten()[0].item(), 'other numbers')} instead of the block of the rank "
        "`previous`"
    )


def check_owners(exercise: ModuleType, world: int) -> None:
    for turn, rank in itertools.product(range(world), repeat=2):
        found, expected = exercise.owner_of_block(turn, rank, world), (rank - turn) % world
        reason = "each turn brings the block of the rank before (rank 0 comes after the last one)"
        if found == (rank + turn) % world:
            reason = "the blocks move to higher ranks, so those that arrive come from lower ranks: subtract the turns"
        elif found == (turn - rank) % world:
            reason = "rank and turn are swapped: subtract the turns from the rank"
        call = f"owner_of_block(turn={turn}, rank={rank}, world={world})"
        assert found == expected, f"{call} returns {found} instead of {expected}; {reason}"


def check_pairs(found: list, own: list[int], other: list[int]) -> None:
    place = f"own pieces {own}, pieces {other} of the owner"
    pairs = {(pair.own, pair.other): pair.cut for pair in found}
    for query, key in pairs:
        assert query in own and key in other, (
            f"{place}: Pair({query}, {key}) has own and other swapped; own is the piece of the queries, other is the "
            "piece of the keys"
        )
    for query, key in itertools.product(own, other):
        assert (query, key) in pairs or key > query, (
            f"{place}: Pair({query}, {key}) is missing, but piece {query} sees "
            f"{'itself' if key == query else f'piece {key}'}; compare each own piece with each other piece"
        )
    for (query, key), cut in pairs.items():
        assert cut or key != query, (
            f"{place}: Pair({query}, {key}) is not cut, so a query would see later tokens of its own piece"
        )
        assert cut or key < query, (
            f"{place}: piece {key} is later than piece {query}, so its queries would see later tokens; skip this pair"
        )
        assert key <= query, (
            f"{place}: piece {key} is later than piece {query}. All of these scores would be hidden, so the result is "
            "right, but the work is wasted; skip this pair"
        )
    assert len(found) == len(pairs), f"{place}: a pair is there twice, so its keys would count twice"


def check_attend_backward(exercise: ModuleType, rank: int) -> None:
    torch.manual_seed(0)
    # Two heads: a transpose of all dimensions is right only without heads
    queries, keys = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(2, 6, 4, dtype=torch.float64)
    queries[..., 0], keys[..., 0] = 50, keys[..., 0] / 50 + 40  # makes all scores about 1,000
    values, gradient = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 4, 4, dtype=torch.float64)
    scores = queries @ keys.mT / 2
    lse, output = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ values
    keys, values, scores = keys[:, 3:], values[:, 3:], scores[..., 3:]  # the block has half of the keys
    arguments = (scores, lse, output, gradient, queries, keys, values)
    expected = solution("ring").attend_backward(*arguments)
    found = exercise.attend_backward(*arguments)
    weights, of_weights = (scores - lse).exp(), gradient @ values.mT
    names = ["queries", "keys", "values"]
    equal = [
        name
        for each in found
        for name, right in zip(names, expected, strict=True)
        if each.shape == right.shape and torch.allclose(each, right)
    ]
    assert len(equal) < len(names) or equal == names, (
        f"attend_backward() returns the gradients of {', '.join(equal)}; return them in the order {', '.join(names)}"
    )
    for name, each, right in zip(names, found, expected, strict=True):
        compare_shapes(f"the gradient of the {name}", each, right)
    assert all(each.isfinite().all() for each in found), (
        "a gradient is not finite, because exp() of a score of 1,000 is infinite; subtract lse before you call exp()"
    )
    for wrong, reason in (
        (scores.softmax(-1), "the weights are the softmax of this block only, but the other blocks' keys count, too"),
        ((scores / 2 - lse).exp(), "the scores are divided by the root of the head size, but they already are"),
    ):
        assert not torch.allclose(found[2], wrong.mT @ gradient), f"{reason}; use exp(scores - lse)"
    for delta, reason in (
        (0, "delta is missing"),
        ((weights * of_weights).sum(-1, keepdim=True), "delta is that of this block only; use the complete output"),
    ):
        wrong = weights * (of_weights - delta) @ keys / 2
        assert not torch.allclose(found[0], wrong), f"in the gradient of the scores {reason}"
    for name, each, right in zip(names, found, expected, strict=True):
        reason = "differs from that of one process"
        if torch.allclose(each, right * 2):
            reason = "is not divided by the root of the head size"
        elif torch.allclose(each, right / 2):
            reason = "is divided by the root of the head size twice"
        assert torch.allclose(each, right), f"the gradient of the {name} {reason}"


def check_ring_backward(exercise: ModuleType, rank: int) -> None:
    reference, world = solution("ring"), dist.get_world_size()
    for name in ("merge", "log_sum_exp", "owner_of_block", "needed_pairs", "exchange", "attend_backward"):
        setattr(exercise, name, getattr(reference, name))  # so that a mistake in another gap does not fail this one
    inputs, expected, gradient = reference.attend_whole(12)
    for zigzag in (False, True):
        ring = exercise.Ring(rank, world, zigzag=zigzag)
        own = [ring.own_part(tensor.detach()) for tensor in inputs]
        output, lse = reference.ring_forward(ring, *own)
        sent, computed = ring.sent, ring.computed
        found = exercise.ring_backward(ring, *own, output, lse, ring.own_part(gradient))
        sent, twice = ring.sent - sent, ring.computed
        right = (4 * world - 2) * own[1].nbytes
        following, previous = (rank + 1) % world, (rank - 1) % world
        assert len(found) == 3, (
            f"ring_backward() returns {len(found)} tensors; return those of queries, keys and values"
        )
        assert twice > computed, "the backward pass computes its own scores; use ring.scores(), which cuts and counts"
        for name, each, whole in zip(("queries", "keys", "values"), found, expected[1:], strict=True):
            reason = "differs from that of one process; it is the sum over the pairs of all turns"
            if not each.any():
                reason = "is 0; to add to a piece, use +=, which changes the whole tensor"
            elif torch.allclose(each, reference.Ring(following, world, zigzag=zigzag).own_part(whole)):
                reason = (
                    f"is that of rank {following}: one turn is missing. After the last turn the gradients are one rank "
                    "away from their owner; pass them on once more"
                )
            elif torch.allclose(each, reference.Ring(previous, world, zigzag=zigzag).own_part(whole)):
                reason = f"is that of rank {previous}: one turn too many"
            elif name != "queries" and sent <= right / 2:
                reason = (
                    f"lacks what other ranks have computed: the rank sends only {sent} bytes instead of {right}. The "
                    "gradients must travel with the keys and values to which they belong"
                )
            assert torch.allclose(each, ring.own_part(whole)), f"the gradient of the {name} {reason}"
        assert twice == 2 * computed, (
            f"the gradients are right, but the backward pass computes {twice - computed} scores, and the forward pass "
            f"{computed}; compute only the needed_pairs()"
        )
        assert sent >= right, (
            f"the gradients are right, but only {sent} bytes instead of {right} are counted; "
            "use ring.pass_on(), which counts the bytes"
        )
        assert sent == right, (
            f"the gradients are right, but the rank sends {sent} bytes instead of {right}: after the last turn nobody "
            "reads the keys and values, so pass on only their gradients"
        )


def check_ring_attention(exercise: ModuleType, rank: int) -> None:
    world = dist.get_world_size()
    for zigzag, tokens in itertools.product((False, True), (24, 29)):
        ring = exercise.Ring(rank, world, zigzag=zigzag)
        found = exercise.run_ring(ring, tokens)
        place = f"with {tokens} tokens{' and zigzag' if zigzag else ''}"
        assert found["difference"] < 1e-12, (
            f"{place} the output or a gradient differs from that of one process by {found['difference']:.1e}"
        )
        pieces = len(ring.pieces(rank))
        piece = -(-tokens // (world * pieces))
        keys = 8 * exercise.HEADS * exercise.HEAD_SIZE * piece * pieces  # bytes
        blocks = 2 * world + 1 if zigzag else rank + 1
        right = {"computed": blocks * exercise.HEADS * piece**2, "largest": exercise.HEADS * piece**2}
        right |= {"forward": 2 * (world - 1) * keys, "backward": (4 * world - 2) * keys if world > 1 else 0}
        counted = {name: found[name] for name in right}
        assert counted == right, f"{place} the rank counts {counted} instead of {right}"


RING = {check_merge: 1, check_ring: 3, check_attend_backward: 1, check_ring_backward: 3}

# A name that only this exercise has: its checks; the check after the last gap, its title and its numbers of ranks; the
# ranks and flags of the next command, and the page to continue with
EXERCISES = {
    "join": (DATA_PARALLEL, None, "", (), 2, " --zero1", "docs/by-hand.md"),
    "ShardedLinear": (SHARD, check_sharded_training, "losses and bytes", (2, 4), 2, "", "docs/ddp.md"),
    "own_layers": (
        PIPELINE,
        check_training,
        "losses and gradients",
        (2, 3, 4),
        4,
        " --schedule 1f1b",
        "docs/pipeline.md",
    ),
    "RingAttention": (
        RING,
        check_ring_attention,
        "output, gradients and bytes",
        (1, 2, 3, 4),
        4,
        "",
        "docs/long-texts.md",
    ),
}


if __name__ == "__main__":
    main()
