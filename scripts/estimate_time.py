"""Estimate the time of an optimizer step under any strategy and on any number of ranks.

    python scripts/estimate_time.py --matmul_tflops 100 --memory_bandwidth 800
    python scripts/estimate_time.py --model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4 \\
        --matmul_tflops 100 --memory_bandwidth 800 --bus_bandwidth 50

The script takes the flags and variables of train.py, and the speed of one GPU while all GPUs work. Use the
times only for planning: nobody has compared them with measurements on a GPU yet. docs/memory.md explains the rows.

The time of the computation follows the roofline model (doi:10.1145/1498765.1498785). Each operation of a micro batch
takes the longer of two times: its arithmetic at the speed of matrix products, and its bytes at the speed of the memory.
The times of the optimizer and of the communication are their bytes divided by a bandwidth.
"""

from collections import Counter

from estimate.command_line import parse_plan
from estimate.communication import sent_bytes
from estimate.model_shape import describe_parameters, trace_shape
from estimate.time import Rates, micro_batch_work, predict_step, read_rates, roofline_seconds
from settings.settings import Settings
from shared.errors import WorkshopError, run_program
from shared.units import GB


def step_table(settings: Settings, rates: Rates) -> str:
    """Return a table with the seconds of each part of a step, and the samples per second."""
    trainer = settings.trainer
    given = settings.estimate
    step = predict_step(settings, rates)
    shape = trace_shape(settings)
    accumulation = trainer.gradient_accumulation_steps
    products = Counter({key: times for key, times in micro_batch_work(settings).items() if key[0]})
    batch = f"{accumulation} x {trainer.per_device_train_batch_size} x {settings.data.max_length} tokens"
    lines = [
        f"{settings.model.model_name}: {describe_parameters(shape)}, {settings.precision}, {batch} per rank, "
        f"{given.gpus} GPU(s) on {given.nodes} node(s)",
        f"each rank: {rates.matmul / 1e12:.4g} TFLOP/s in matrix products, {rates.memory / GB:.4g} GB/s of memory, "
        f"{rates.bus / GB:.4g} GB/s between ranks",
        "seconds of an optimizer step",
        f"{'compute':16}{step.compute:10.4g}  matrix products {accumulation * roofline_seconds(products, rates):.4g}",
        f"{'optimizer':16}{step.optimizer:10.4g}",
        f"{'communication':16}{step.communication:10.4g}  {sent_bytes(shape, settings) / GB:.3g} GB sent by each rank",
    ]
    none_hidden = step.seconds + step.hidden
    all_hidden = none_hidden - min(step.compute, step.communication)
    samples = trainer.per_device_train_batch_size * accumulation * given.gpus
    for name, seconds in (("no overlap", none_hidden), ("full overlap", all_hidden), ("expected", step.seconds)):
        lines += [f"{name:16}{seconds:10.4g}  {samples / seconds:.4g} samples/s of all ranks"]
    if given.gpus > 1 and not given.bus_bandwidth:
        lines += ["communication is left out: give --bus_bandwidth, from measure_bandwidth.py"]
    if settings.model.attention == "sdpa":
        lines += ["attention is counted as if it wrote its scores to memory; the savings of SDPA are not known"]
    return "\n".join([*lines, "Not counted: launching operations, data, logging, evaluation, saving."])


def main() -> None:
    settings = parse_plan(description=__doc__)
    rates = read_rates(settings)
    if rates is None:
        what = "the speed of the GPUs is not known"
        raise WorkshopError("--matmul_tflops, --memory_bandwidth", what, "give both; see docs/memory.md")
    print(step_table(settings, rates))


if __name__ == "__main__":
    run_program(main)
