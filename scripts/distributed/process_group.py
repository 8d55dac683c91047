"""Start and end of a rank: its environment under any launcher, its process group and its exit code.

collectives.py has the collectives that ranks call between start and end. FIXES in training/upstream_fixes.py lists the
workarounds for errors in libraries, and when each workaround can be removed.
"""

import atexit
import logging
import math
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
from distributed.collectives import local_world_size, print_once, rank, ranks_per_gpu, wait_for_all_ranks, world_size
from distributed.rendezvous import free_port, job_port, node_name
from shared.errors import ENVIRONMENT, WorkshopError, report, survive_lost_output, whole_number

# Out-of-memory messages that do not come from PyTorch's CUDA allocator: cudaMalloc and cudaHostAlloc (which NCCL and
# Triton also call), cuBLAS, and PyTorch's CPU allocator
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")

# Messages of gloo, NCCL and PyTorch's store after another rank has ended
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


def prepare_environment(shards: bool) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT if the launcher has not, and bind the GPU.

    torchrun sets all of them. Bare srun sets variables of its own, such as SLURM_PROCID. Under plain python a run that
    shards gets a world size of 1, because DeepSpeed would otherwise look for MPI. Other runs need no variables.
    Call this before DeepSpeed is imported; transformers imports DeepSpeed in every run.
    """
    silence_known_warnings()
    env = os.environ
    if "RANK" not in env and whole_number("SLURM_STEP_NUM_TASKS", "1") > 1:
        env["RANK"] = str(whole_number("SLURM_PROCID"))
        env["LOCAL_RANK"] = str(whole_number("SLURM_LOCALID"))
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        # accelerate reads the number of ranks per node from this variable. Slurm writes it as 4(x2), for example
        env["LOCAL_WORLD_SIZE"] = env.get("SLURM_STEP_TASKS_PER_NODE", env["WORLD_SIZE"]).split("(")[0].split(",")[0]
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
        # All ranks compute the same port from the job id, and other jobs on the node most likely get another port
        env.setdefault("MASTER_PORT", str(job_port(env["SLURM_JOB_ID"])))
    if "RANK" not in env and shards:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(str(os.getpid())))}
    if world_size() > 1:
        print(f"Initializing process group for rank {env['RANK']}")
        print(f"MASTER_ADDR: {env.get('MASTER_ADDR')}")
        print(f"MASTER_PORT: {env.get('MASTER_PORT')}", flush=True)
    bind_device()
    prepare_deepspeed()


def prepare_deepspeed() -> None:
    """Set the variables that DeepSpeed reads. Call this before DeepSpeed is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no GPU
    # DeepSpeed compiles its own AdamW with ninja, which pip installs into the folder of this python
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def silence_known_warnings() -> None:
    """Filter out warnings that are harmless and that a user cannot act on."""
    # DeepSpeed calls collectives by deprecated names, and PyTorch warns at each call
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed and the Trainer call a barrier without naming the GPU, which bind_device has selected
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
    # accelerate asks for the mesh of HYBRID_SHARD in a way that PyTorch deprecates
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    # With FSDP and tensor parallelism the logits are a view, but no code changes them in place. The second warning is
    # about two collectives in a row that could be one
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # accelerate warns that DeepSpeed's gradient accumulation differs from its own default, but uses DeepSpeed's
    logging.getLogger("accelerate.accelerator").addFilter(
        lambda entry: "GradientAccumulationPlugin has" not in entry.msg
    )


def bind_device() -> None:
    """Select this rank's GPU by its local rank, before any code allocates memory on cuda:0."""
    if not torch.cuda.is_available():
        # With a driver that is too old for this torch, CUDA cannot use the GPU. torch.cuda.device_count() still counts
        # the GPU, because it asks NVML. is_available() also counts it once DeepSpeed has been imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = torch.cuda.device_count()
    local_rank = whole_number("LOCAL_RANK", "0")
    # Under bare srun with --gpus-per-task or --gpu-bind, each task sees only its own GPU. If a node has fewer GPUs than
    # tasks, several tasks see the same GPU
    gpu_per_task = whole_number("SLURM_GPUS_ON_NODE", "0") >= local_world_size()
    own_gpu = gpus == 1 and gpu_per_task and "TORCHELASTIC_RUN_ID" not in os.environ
    sharing = math.ceil(local_world_size() / gpus) if gpus and not own_gpu else 1
    shared = 1 < sharing <= ranks_per_gpu()
    os.environ["RANKS_PER_GPU"] = str(sharing if shared else 1)
    if shared:
        local_rank %= gpus
        allow_shared_gpu(sharing)
    elif own_gpu:
        local_rank = 0
    if "LOCAL_RANK" in os.environ:  # DeepSpeed and accelerate use this variable as the index of the GPU
        os.environ["LOCAL_RANK"] = str(local_rank)
    if gpus and local_rank >= gpus:
        what = f"{local_rank}, but this process sees {gpus} of the GPUs of {socket.gethostname()}"
        remedy = (
            "start as many processes per node as it has GPUs, without GPU binding (--gpus-per-task, --gpu-bind), "
            f"let ranks share a GPU (RANKS_PER_GPU={max(2, sharing)} before the command), "
            "or train on the CPU: CUDA_VISIBLE_DEVICES= before the command"
        )
        raise WorkshopError("LOCAL_RANK", what, remedy, ENVIRONMENT)
    if not gpus and os.environ.get("REQUIRE_GPU") == "1":
        what = f"PyTorch sees none on {socket.gethostname()}"
        remedy = (
            "compare the driver (nvidia-smi) with the CUDA version that this torch needs (docs/environment.md), "
            "or use SITE=laptop"
        )
        raise WorkshopError("GPU", what, remedy, ENVIRONMENT)
    if gpus:
        torch.cuda.set_device(local_rank)
        # On compute capability 9 and 10 PyTorch prefers cuDNN's attention kernel, which is planned again for each new
        # length (modelscope/FunASR#3704). An H200 needed 113 ms for that, and 0.4 ms with another kernel. Micro batches
        # have many lengths, except with PADDING=max_length
        torch.backends.cuda.enable_cudnn_sdp(False)


def allow_shared_gpu(sharing: int) -> None:
    """Let NCCL accept ranks that share a GPU. sharing: the number of ranks per GPU.

    NCCL refuses two ranks on one GPU of a host. So each rank claims a host of its own, and they connect by sockets.
    """
    variables = {"NCCL_HOSTID": f"rank-{rank()}", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}
    if world_size() == local_world_size():
        variables |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    print_once(f"{sharing} ranks share each GPU (RANKS_PER_GPU), so no speed is measured")


def adopt_process_group(training_args: Any, with_deepspeed: bool) -> None:
    """Let DeepSpeed use the process group that TrainingArguments has opened, and print rank and world size.

    On the CPU transformers leaves this step to DeepSpeed's engine. ZeRO-3 shards the model before that engine
    exists. Without this call ZeRO-3 would assume a world size of 1.
    """
    watchdog.progress("the start, in one group")
    if training_args.n_gpu > 1:
        # transformers would use nn.DataParallel, but a process of this workshop uses one GPU
        print(f"plain python uses 1 of the {training_args.n_gpu} visible GPUs; start with torchrun to use all")
        training_args._n_gpu = 1
    if with_deepspeed:
        import deepspeed

        if not torch.cuda.is_available():
            # Without this line DeepSpeed compiles deepspeed_shm_comm, which only inference uses (comm/torch.py,
            # build_shm_op). Do not read this attribute first: reading it tests the compiler for each extension
            deepspeed.ops.__compatible_ops__ = {}
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    if dist.is_initialized() and dist.get_world_size() > 1:
        print(
            f"torch.distributed initialized: rank {dist.get_rank()} / world size {dist.get_world_size()}",
            flush=True,
        )


left_groups: list[dist.ProcessGroup | None] = []


def leave_process_group() -> None:
    """Wait for the other ranks, then close the process group.

    A rank that leaves early breaks its connections to the ranks that still communicate.

    The group's object stays until the process ends. If DDP's reducer were the last to free it, the rank would hang in
    about 1 of 25 runs: the reducer waits for gloo's threads without releasing Python's lock, and one of these threads
    may need the lock to free a tensor.
    """
    if dist.is_initialized():
        watchdog.progress("the end")
        wait_for_all_ranks()
        watchdog.stop()
        left_groups.append(dist.group.WORLD)
        dist.destroy_process_group()


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run a script's `main` and end the process with its exit code, without the interpreter's shutdown.

    With PyTorch the shutdown takes seconds. A sharded model also keeps its process groups, and so gloo's threads, until
    the end. In about 1 of 100 exits such a thread is still running while the interpreter shuts down. The job then fails
    with SIGABRT and "terminate called without an active exception".
    """
    survive_lost_output()
    code = run_and_report(main)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_and_report(main: Callable[[], None]) -> int:
    """Run `main`, report its exception if it raises one, and return the exit code."""
    try:
        main()
        return 0
    except WorkshopError as error:
        report(error)
        return error.code
    except SystemExit as ended:
        if isinstance(ended.code, str):  # some libraries pass a text to sys.exit, which Python would print
            print(ended.code, file=sys.stderr)
        return exit_code(ended)
    except Exception as error:
        if is_out_of_memory(error):
            what = next((line for line in str(error).splitlines() if is_out_of_memory(line)), "there is none left")
            remedy = "lower --per_device_train_batch_size or --max_length, or offload"
            report(WorkshopError("memory", what.split(". ")[0], remedy, code=1))
            return 1
        if world_size() > 1 and any(words in str(error) for words in LOST_CONNECTION):  # a traceback would not help
            what = str(error).splitlines()[0]
            print(f"rank {rank()} on {node_name()} lost another rank: {what}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(*sys.exc_info())  # PyTorch's hook prints the rank
        if world_size() > 1:
            time.sleep(2)  # if another rank caused this error by ending, let its launcher notice that end first
        return 1


def is_out_of_memory(error: object) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with this exception."""
    if isinstance(error, WorkshopError):
        return error.code
    if isinstance(error, SystemExit):
        return 1 if isinstance(error.code, str) else error.code or 0
    return 1 if error else 0


def first_host(nodelist: str) -> str:
    """Return the first node of a Slurm node list such as ``gpu[03-07]``."""
    if "[" not in nodelist:
        return nodelist.split(",")[0]
    return subprocess.check_output(["scontrol", "show", "hostnames", nodelist], text=True).split()[0]
