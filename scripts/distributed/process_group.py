"""Start and end of a process of a training: its environment under any launcher, its process group, its exit code.

What the ranks send each other in between is in collectives.py. Workarounds for errors of libraries have a row in FIXES
of training/upstream_fixes.py, with the condition under which each can go.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distributed import watchdog
from distributed.collectives import local_world_size, rank, wait_for_everyone, world_size
from distributed.rendezvous import free_port, node_name, port_of
from shared.errors import ENVIRONMENT, WorkshopError, report, survive_lost_output, whole_number

# How others than PyTorch's allocator say that there is no memory left: cudaMalloc and cudaHostAlloc (also of NCCL and
# Triton), cuBLAS, and the allocator of the CPU
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")

# How gloo, NCCL and PyTorch's store say that another rank has ended
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


def prepare_environment(shards: bool) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where the launcher did not, and bind the GPU.

    torchrun sets them all. Bare srun gives its own names (SLURM_PROCID, SLURM_LOCALID). Plain python gets a
    world of one if the run shards (DeepSpeed would look for MPI otherwise) and nothing if it does not.
    To be called before DeepSpeed is imported, which transformers does in any case.
    """
    silence_known_warnings()
    env = os.environ
    if "RANK" not in env and whole_number("SLURM_STEP_NUM_TASKS", "1") > 1:
        env["RANK"] = str(whole_number("SLURM_PROCID"))
        env["LOCAL_RANK"] = str(whole_number("SLURM_LOCALID"))
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        # accelerate reads the ranks of one node from here; Slurm writes e.g. 4(x2)
        env["LOCAL_WORLD_SIZE"] = env.get("SLURM_STEP_TASKS_PER_NODE", env["WORLD_SIZE"]).split("(")[0].split(",")[0]
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
        # the same on every rank without talking to each other, and different for neighbouring jobs
        env.setdefault("MASTER_PORT", str(port_of(env["SLURM_JOB_ID"])))
    if "RANK" not in env and shards:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port(str(os.getpid()))))
    if world_size() > 1:
        print(f"Initializing process group for rank {env['RANK']}")
        print(f"MASTER_ADDR: {env.get('MASTER_ADDR')}")
        print(f"MASTER_PORT: {env.get('MASTER_PORT')}", flush=True)
    bind_device()
    prepare_deepspeed()


def prepare_deepspeed() -> None:
    """Set the variables that DeepSpeed reads when it is imported; to be called before that."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no GPU
    # with a config that lacks torch_adam it compiles, by the ninja that pip has put beside this python
    beside = os.path.dirname(sys.executable)
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"


def silence_known_warnings() -> None:
    """Keep warnings out of the log that are harmless and that a user cannot act on."""
    # DeepSpeed calls collectives by names that PyTorch deprecates: one warning per call
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed and the Trainer call a barrier without naming the GPU, which bind_device has selected
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
    # accelerate asks for the mesh of HYBRID_SHARD in a way that PyTorch deprecates
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    # tensor parallelism with FSDP returns the logits as a view, which nobody changes in place, and uses two collectives
    # where one might do
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # accelerate compares DeepSpeed's gradient accumulation with its own default, and then uses the right one
    logging.getLogger("accelerate.accelerator").addFilter(
        lambda entry: "GradientAccumulationPlugin has" not in entry.msg
    )


def bind_device() -> None:
    """Select the GPU with this process's local rank, before anything allocates memory on cuda:0."""
    if not torch.cuda.is_available():
        # CUDA cannot start a GPU if the driver is too old for this torch. But torch.cuda.device_count() asks NVML and
        # counts the GPU, and so does is_available() after DeepSpeed has been imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    local_rank = whole_number("LOCAL_RANK", "0")
    gpus = torch.cuda.device_count()
    # bare srun with --gpus-per-task or --gpu-bind; without a GPU for each task they would all see the same one
    a_gpu_for_each_task = whole_number("SLURM_GPUS_ON_NODE", "0") >= local_world_size()
    if gpus == 1 and local_rank > 0 and a_gpu_for_each_task and "TORCHELASTIC_RUN_ID" not in os.environ:
        # DeepSpeed and accelerate take this variable for the number of the GPU
        local_rank = 0
        os.environ["LOCAL_RANK"] = "0"
    if gpus and local_rank >= gpus:
        what = f"{local_rank}, but this process sees {gpus} of the GPUs of {socket.gethostname()}"
        way_out = (
            "start as many processes per node as it has GPUs, without GPU binding (--gpus-per-task, --gpu-bind), "
            "or train on the CPU: CUDA_VISIBLE_DEVICES= before the command"
        )
        raise WorkshopError("LOCAL_RANK", what, way_out, ENVIRONMENT)
    if not gpus and os.environ.get("REQUIRE_GPU") == "1":
        what = f"PyTorch sees none on {socket.gethostname()}"
        way_out = (
            "compare the driver (nvidia-smi) with the CUDA version that this torch needs (docs/environment.md), "
            "or use SITE=laptop"
        )
        raise WorkshopError("GPU", what, way_out, ENVIRONMENT)
    if gpus:
        torch.cuda.set_device(local_rank)
        # On compute capability 9 and 10 PyTorch prefers cuDNN's attention kernel, which plans anew for each shape:
        # a second for each new length (modelscope/FunASR#3704). Batches padded to their longest have many lengths
        torch.backends.cuda.enable_cudnn_sdp(False)


def adopt_process_group(training_args: Any, with_deepspeed: bool) -> None:
    """Take over the process group that TrainingArguments has opened, for DeepSpeed too, and print this rank's place.

    On the CPU transformers leaves this to the engine, but ZeRO-3 shards the model before there is one, and
    would take itself for a world of one.
    """
    watchdog.progress("the start, in one group")
    if training_args.n_gpu > 1:
        # transformers would fall back to nn.DataParallel; one process drives one GPU in this workshop
        print(f"plain python uses 1 of the {training_args.n_gpu} visible GPUs; start with torchrun to use all")
        training_args._n_gpu = 1
    if with_deepspeed:
        import deepspeed

        if not torch.cuda.is_available():
            # Without this line DeepSpeed compiles deepspeed_shm_comm, which only inference uses (comm/torch.py,
            # build_shm_op). Do not read this attribute before: that tries the compiler for each of its extensions
            deepspeed.ops.__compatible_ops__ = {}
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    if dist.is_initialized() and dist.get_world_size() > 1:
        print(
            f"torch.distributed initialized: rank {dist.get_rank()} / world size {dist.get_world_size()}",
            flush=True,
        )


def leave_process_group() -> None:
    """Wait for the other ranks and close: who leaves early breaks the connections of those who still talk."""
    if dist.is_initialized():
        watchdog.progress("the end")
        wait_for_everyone()
        watchdog.stop()
        dist.destroy_process_group()


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run a script's `main` and end the process with its exit code, without the interpreter's shutdown.

    Behind PyTorch that takes seconds. And a sharded model refers to process groups to the very end, and so keeps gloo's
    threads. In about 1 of 100 exits one meets the interpreter as it shuts down: "terminate called without an active
    exception", SIGABRT, a failed job.
    """
    survive_lost_output()
    code = run_and_report(main)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_and_report(main: Callable[[], None]) -> int:
    """Run `main`, say what it raised, and give the exit code that this stands for."""
    try:
        main()
        return 0
    except WorkshopError as error:
        report(error)
        return error.code
    except SystemExit as ended:
        if isinstance(ended.code, str):  # libraries give a text to sys.exit; Python would print it
            print(ended.code, file=sys.stderr)
        return exit_code(ended)
    except Exception as error:
        if is_out_of_memory(error):
            what = next((line for line in str(error).splitlines() if is_out_of_memory(line)), "there is none left")
            way_out = "lower --per_device_train_batch_size or --max_length, or offload"
            report(WorkshopError("memory", what.split(". ")[0], way_out, code=1))
            return 1
        if is_lost_connection(error):
            what = str(error).splitlines()[0]
            print(f"rank {rank()} on {node_name()} lost another rank: {what}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(*sys.exc_info())  # PyTorch's, which names the rank
        if world_size() > 1:
            time.sleep(2)  # if another rank's death is the cause, that one is noted first
        return 1


def is_out_of_memory(error: object) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed as another rank, or the way to it, is gone: a traceback would tell nothing of it."""
    return world_size() > 1 and any(words in str(error) for words in LOST_CONNECTION)


def exit_code(error: BaseException | None) -> int:
    """Exit code of a process that this exception ends."""
    if isinstance(error, WorkshopError):
        return error.code
    if isinstance(error, SystemExit):
        return 1 if isinstance(error.code, str) else error.code or 0
    return 1 if error else 0


def first_host(nodelist: str) -> str:
    """First name of a Slurm node list such as ``gpu[03-07]``."""
    if "[" not in nodelist:
        return nodelist.split(",")[0]
    return subprocess.check_output(["scontrol", "show", "hostnames", nodelist], text=True).split()[0]
