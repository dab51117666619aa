"""Memory: of the card, of the machine, of the container, and shared memory."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.attention import OOM, OOM_TEXT
from orchestrator.diagnosis.catalogue.words import KERNEL, line, raised
from orchestrator.diagnosis.model import Cause

CAUSES = (
    Cause(
        "gpu-memory-size",
        "the model or the batch does not fit into the card's memory",
        "memory",
        (
            raised(OOM, OOM_TEXT),
            raised(OOM, "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
        ),
        (
            "Make what is on the card smaller: rows per step, row length, activation checkpointing, sharding of the "
            "optimizer, a smaller part of the logits at once.",
            "The same launch fails again at the same place.",
        ),
        precedence=60,
    ),
    Cause(
        "gpu-memory-fragmented",
        "the card's memory is reserved in pieces that do not fit the request",
        "memory",
        (raised(OOM, OOM_TEXT, when="fragmented"),),
        (
            "Much memory is reserved by PyTorch but not in use. Let segments grow: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Fixed shapes avoid it.",
        ),
        "orch launch {recipe} --set env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        retry=True,
        precedence=64,
    ),
    Cause(
        "gpu-memory-held",
        "another process holds the card's memory",
        "memory",
        (raised(OOM, OOM_TEXT, when="other_process"),),
        (
            "The message names the process and what it holds. Its pid may be of the host or another container: "
            "nvidia-smi inside a container shows no foreign process.",
            "Wait for it, end it on the host, or choose another card (CUDA_VISIBLE_DEVICES).",
        ),
        "orch exec {host} -- nvidia-smi",
        retry=True,
        precedence=66,
    ),
    Cause(
        "shared-memory-per-block",
        "a kernel needs more shared memory per block than the card has",
        "memory",
        (
            raised(
                "OutOfResources|OutOfMemoryError|RuntimeError|InductorError",
                "out of resource",
                after=r"Required:? ?\d+.*Hardware limit:? ?\d+",
            ),
        ),
        (
            "These are bytes of one multiprocessor, not the card's memory: a smaller batch changes nothing.",
            "Give smaller blocks or fewer stages (flex_attention's kernel_options BLOCK_M, BLOCK_N, num_stages), or "
            "another head size. On sm_120 a block has 101,376 bytes.",
        ),
        precedence=92,
    ),
    Cause(
        "container-memory",
        "the container's memory limit was reached, and the kernel killed a process",
        "memory",
        (
            line("Memory cgroup out of memory", KERNEL + r"Memory cgroup out of memory"),
            line(
                ("Detected an out of memory cgroup event", "oom_kill event", "oom-kill event"),
                r"^(?:slurmstepd: )?(?:error: )?Detected (?:an out of memory cgroup event|\d+ oom.kill event)",
            ),
        ),
        (
            "Host memory, not the card's. Give the container more (its limit is in its configuration), or need less: "
            "fewer data loader or compile processes, memory-mapped data.",
        ),
        "ssh {host} pct set {container} --memory MIB",
        structured=("cgroup_oom_kill",),
        precedence=70,
    ),
    Cause(
        "host-memory",
        "the machine ran out of memory, and the kernel killed a process",
        "memory",
        (line("Out of memory: Kill", KERNEL + r"Out of memory: Kill(?:ed)? process \d+"),),
        (
            "Something on the machine, this run or another, took all its memory. See who (free, ps on the host), "
            "and give this container a limit that the host can keep.",
        ),
        "ssh {host} free -m",
        structured=("machine_oom_kill",),
        retry=True,
        precedence=69,
    ),
    Cause(
        "out-of-host-memory",
        "the program asked for more host memory than it could have",
        "memory",
        (
            raised("MemoryError|_ArrayMemoryError", literals=("MemoryError",)),
            raised(
                "RuntimeError",
                "can't allocate memory",
                "DefaultCPUAllocator",
                "not enough memory: you tried to allocate",
            ),
            raised("OSError|BlockingIOError", "Cannot allocate memory"),
            raised("RuntimeError|AcceleratorError", "CUDA error: OS call failed", "cudaHostAlloc"),
        ),
        ("The line shows how much was asked for. Use less at once, or give the container more memory.",),
        precedence=62,
    ),
    Cause(
        "shm-too-small",
        "/dev/shm is too small",
        "memory",
        (
            line(
                "insufficient shared memory (shm)",
                r"insufficient shared memory \(shm\)",
            ),
            line(
                "is killed by signal: Bus error",
                r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Bus error",
            ),
            line(
                "/dev/shm/nccl-",
                r"/dev/shm/nccl-\S+.*(?:No space|failed|error)|(?:shared memory|posix_fallocate).*/dev/shm/nccl-",
            ),
            raised("RuntimeError|OSError", "unable to write to file </torch_", "unable to allocate shared memory(shm)"),
        ),
        (
            "Data loaders and NCCL exchange data there; it counts against the container's memory limit.",
            "Enlarge it (mount -o remount,size=16G /dev/shm), or use fewer loader processes "
            "(torch.multiprocessing.set_sharing_strategy('file_system')).",
        ),
        "orch exec {place} -- df -h /dev/shm",
        precedence=86,
    ),
)
