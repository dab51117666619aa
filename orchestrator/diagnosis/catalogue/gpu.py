"""The card, its driver, and errors of kernels on it."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import KERNEL, line, raised, said
from orchestrator.diagnosis.model import Cause

_ANY = r"[A-Za-z_]\w*(?:Error|Exception)"
_SMI = "orch exec {place} -- nvidia-smi"

CAUSES = (
    Cause(
        "device-side-assert",
        "a kernel's assertion failed on the card",
        "gpu",
        (
            raised(_ANY, "device-side assert triggered", literals=("device-side assert triggered",)),
            line(
                "` failed.",
                r"^(?:/\S+|\.\.\S+)\.cu\w*:\d+: .*block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion `",
            ),
        ),
        (
            "Mostly an index beyond a table: a token id above the vocabulary, a label outside the classes. The "
            "assertion's text says which; the Python frame shown is a later one.",
            "Run once with CUDA_LAUNCH_BLOCKING=1, or the failing batch on the CPU, to see the very call.",
        ),
        precedence=74,
    ),
    Cause(
        "illegal-memory-access",
        "a kernel touched memory that is not its own",
        "gpu",
        (
            raised(
                _ANY,
                "an illegal memory access was encountered",
                "CUDA_ERROR_ILLEGAL_ADDRESS",
                "misaligned address",
                literals=(
                    "an illegal memory access was encountered",
                    "CUDA_ERROR_ILLEGAL_ADDRESS",
                    "misaligned address",
                ),
            ),
            line(
                "an illegal memory access was encountered",
                r"CUDA error: an illegal memory access|Failed: Cuda failure.*illegal memory access",
            ),
            line("CUDA_ERROR_ILLEGAL_ADDRESS", r"CUDA_ERROR_ILLEGAL_ADDRESS"),
        ),
        (
            "The frame shown is not the cause: kernels run asynchronously. Run with CUDA_LAUNCH_BLOCKING=1, or under "
            "compute-sanitizer.",
            "Once, or on several cards: the software, mostly a kernel of its own. Again and again on the same card "
            "(Xid 31 with one PCI address): suspect the card.",
        ),
        structured=("xid_program",),
        precedence=68,
        family="cuda",
    ),
    Cause(
        "cuda-launch-failure",
        "a kernel failed on the card",
        "gpu",
        (
            raised(
                _ANY,
                "unspecified launch failure",
                "CUDA_ERROR_LAUNCH_FAILED",
                "an illegal instruction was encountered",
                "hardware stack error",
                "CUBLAS_STATUS_EXECUTION_FAILED",
                "CUDNN_STATUS_INTERNAL_ERROR",
                "CUDNN_STATUS_EXECUTION_FAILED",
            ),
            line(
                "unspecified launch failure",
                r"CUDA error: unspecified launch failure|Cuda failure.*unspecified launch failure",
            ),
        ),
        (
            "Join it with the kernel log's Xid of that minute: 13 and 31 are mostly the program, 79, 48 and 94 the "
            "card. The frame shown is a later one; CUDA_LAUNCH_BLOCKING=1 finds the call.",
        ),
        precedence=66,
        family="cuda",
    ),
    Cause(
        "gpu-off-bus",
        "a GPU fell off the bus",
        "gpu",
        (
            line("GPU has fallen off the bus", KERNEL + r"(?:NVRM|nvidia).*GPU has fallen off the bus"),
            line("GPU is lost", r"^(?:Unable to determine.*|GPU \S+: )?GPU is lost"),
            line("Unable to determine the device handle for GPU", r"^Unable to determine the device handle for GPU"),
        ),
        (
            "Hardware, power, heat or PCIe: no program inside the container repairs it. The host has to be rebooted, "
            "or the card reset there.",
            "Leave that card out until then (CUDA_VISIBLE_DEVICES). If it comes back often: seating, power cable, "
            "temperature, a lower power limit as a test.",
        ),
        _SMI,
        structured=("xid_lost", "smi_lost", "gpu_vanished"),
        precedence=95,
        family="hardware",
    ),
    Cause(
        "gpu-ecc",
        "the card's memory has an uncorrectable error",
        "gpu",
        (
            raised(_ANY, "uncorrectable ECC error encountered", "CUDA_ERROR_ECC_UNCORRECTABLE"),
            line("NVRM: Xid", KERNEL + r"NVRM: Xid \(PCI:[^)]*\): (?:48|63|64|94|95),"),
        ),
        (
            "A reset of the card (on the host, with nobody on it) retires the page or remaps the row. If it comes "
            "again on the same card, have it replaced.",
        ),
        "ssh {host} nvidia-smi -q -d ECC,ROW_REMAPPER",
        structured=("xid_ecc",),
        precedence=94,
        family="hardware",
    ),
    Cause(
        "gpu-driver-fault",
        "the driver reported a fault of the card (Xid)",
        "gpu",
        (
            line(
                "NVRM: Xid",
                KERNEL + r"NVRM: Xid \(PCI:[^)]*\): (?:32|38|45|56|57|61|62|69|74|109|110|119|120|140|143|149|154),",
            ),
        ),
        (
            "The number is the class: 74 NVLink, 109 a context switch that hung, 119 and 120 the card's own "
            "processor (GSP), 154 says which recovery is needed. 45 alone only follows a killed program.",
            "Reset the card or reboot the host; if the same card does it again, take it out.",
        ),
        "ssh {host} dmesg | grep Xid",
        structured=("xid_driver",),
        precedence=93,
        family="hardware",
    ),
    Cause(
        "driver-mismatch",
        "the driver's library in the container is not of the host's driver version",
        "gpu",
        (
            line(
                "Driver/library version mismatch",
                r"^(?:Failed to initialize NVML|nvidia-\S+|NVML|\S*NVMLError\S*): ?.*Driver/library version mismatch",
            ),
            raised(
                _ANY,
                "system has unsupported display driver / cuda driver combination",
                "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            ),
        ),
        (
            "One side was upgraded without the other. Install the host's exact version in the container, without "
            "kernel modules (--no-kernel-module); after an upgrade of the host, reboot it first.",
        ),
        "orch exec {place} -- cat /proc/driver/nvidia/version",
        structured=("smi_mismatch",),
        precedence=90,
        family="driver",
    ),
    Cause(
        "driver-too-old",
        "the driver is too old for this CUDA",
        "gpu",
        (
            line(
                "The NVIDIA driver on your system is too old",
                r"^(?:\S+: )?(?:CUDA initialization: )?The NVIDIA driver on your system is too old",
            ),
            raised(_ANY, "CUDA driver version is insufficient for CUDA runtime version", "cudaErrorInsufficientDriver"),
            raised(_ANY, "the provided PTX was compiled with an unsupported toolchain"),
        ),
        (
            "The number in the message is CUDA's version times 1000. A cu130 build needs driver 580 or later.",
            "Use an environment of an older CUDA (backend: cu128), or upgrade the driver on the host and the "
            "library in the container with it.",
        ),
        precedence=88,
        family="driver",
    ),
    Cause(
        "uvm-missing",
        "CUDA does not start though nvidia-smi works: /dev/nvidia-uvm",
        "gpu",
        (
            line("CUDA unknown error - this may be due to an incorrectly set up environment", r"CUDA unknown error"),
            line("CUDA_ERROR_UNKNOWN", r"cuInit.*CUDA_ERROR_UNKNOWN|CUDA_ERROR_UNKNOWN.*999"),
            line("lstat /dev/nvidia-uvm", r"lstat /dev/nvidia-uvm: no such file"),
            line("initialization error", r"CUDA (?:driver )?(?:error|initialization).*error=999", after="999"),
        ),
        (
            "Look for the node first: it is made on the host once the nvidia_uvm module is loaded, and must be there "
            "before the container starts. Its major number changes with the host's boot.",
            "If the node is there, reload the module on the host: rmmod nvidia_uvm; modprobe nvidia_uvm.",
        ),
        "ssh {host} nvidia-modprobe -u -c 0",
        structured=("uvm_node_missing",),
        precedence=86,
        family="driver",
    ),
    Cause(
        "no-gpu",
        "there is no CUDA device for the program",
        "gpu",
        (
            raised("RuntimeError|AcceleratorError", "No CUDA GPUs are available"),
            raised(_ANY, "no CUDA-capable device is detected", "Found no NVIDIA driver on your system"),
            raised(_ANY, "CUDA error: invalid device ordinal"),
            raised(
                "RuntimeError",
                "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False",
            ),
            said("sees no CUDA device here"),
        ),
        (
            "Too few cards are visible: see CUDA_VISIBLE_DEVICES in the recipe's env, the number of ranks, and which "
            "/dev/nvidia* the container's configuration passes through.",
        ),
        _SMI,
        structured=("smi_no_device",),
        precedence=84,
        family="driver",
    ),
    Cause(
        "torch-without-cuda",
        "this torch was built without CUDA",
        "gpu",
        (
            raised("AttributeError", "module 'torch._C' has no attribute '_cuda_"),
            raised(
                "AssertionError|RuntimeError",
                "Torch not compiled with CUDA enabled",
                "PyTorch is not linked with support for cuda",
            ),
        ),
        (
            "The environment holds the CPU build of torch. Choose an environment whose backend is cu126, cu128 or "
            "cu130, or set the device to cpu.",
        ),
        precedence=85,
    ),
    Cause(
        "no-kernel-image",
        "the program has no kernels for this card",
        "gpu",
        (
            raised(_ANY, "no kernel image is available for execution on the device", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
            line("no kernel image is available", r"CUDA error: no kernel image is available"),
        ),
        (
            "A library was built for other generations of cards: torch itself (too old for the card), or a package "
            "with its own kernels. Use a build that names this card's compute capability.",
        ),
        "orch exec {place} -- nvidia-smi --query-gpu=name,compute_cap --format=csv",
        precedence=83,
    ),
)
