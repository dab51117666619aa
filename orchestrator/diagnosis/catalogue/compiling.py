"""torch.compile, Triton, and the caches of both."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised
from orchestrator.diagnosis.model import Cause

_CACHE = r"(?:torchinductor|inductor|triton|autotune_cache|codecache|cached_autotune|torch_compile_cache|compile_cache)"

CAUSES = (
    Cause(
        "fx-trace-race",
        "threads raced on torch's process-wide FX tracing flag",
        "compiling",
        (raised("RuntimeError", "Detected that you are using FX to symbolically trace a dynamo-optimized function"),),
        (
            "One thread called a compiled function while another was tracing (compiling, exporting, or running flex "
            "attention uncompiled with gradients). torch up to 2.13 keeps one flag for the whole process.",
            "Run one process per worker (torchrun, one GPU each). A warm cache or a clean environment does not help, "
            "and error_on_nested_fx_trace=False makes attention dense instead.",
            "Where threads cannot be avoided, compile every shape, forward and backward, under one lock before they "
            "start, then torch.compiler.set_stance('fail_on_recompile').",
        ),
        precedence=80,
    ),
    Cause(
        "fx-poisoned-process",
        "concurrent FX traces left the process broken",
        "compiling",
        (
            raised("AssertionError", "CURRENT_PATCHER is None in finally block"),
            raised("NameError", "module is not installed as a submodule"),
        ),
        (
            "Two symbolic traces ran at once in one process; torch.nn.Module may stay patched for its whole life.",
            "End the worker and start it anew: retrying inside the same process fails again. One process per worker.",
        ),
        retry=True,
        precedence=80,
    ),
    Cause(
        "compile-deadlock",
        "two threads wait for each other inside torch's compiler",
        "compiling",
        (
            line(
                "in compile_fx_backward",
                r"^\s*File \"[^\"]+\", line \d+,? in compile_fx_backward",
                when="deadlock_stacks",
            ),
        ),
        (
            "One thread compiles a lazy backward on the autograd device thread and waits for the compile lock; "
            "another holds it and waits for the same device thread. It does not end by itself.",
            "Stop the run. Do the first forward and backward pass of each shape one after another, or use one "
            "process per worker.",
        ),
        "orch stop {run} --kill",
        structured=("stacks_deadlock",),
        precedence=85,
    ),
    Cause(
        "recompile-limit",
        "torch.compile reached its recompile limit",
        "compiling",
        (
            raised(
                "FailOnRecompileLimitHit|RecompileLimitExceeded",
                literals=("FailOnRecompileLimitHit", "RecompileLimitExceeded"),
            ),
            raised("Unsupported", "Dynamo recompile limit exceeded", "recompile_limit"),
        ),
        (
            "Shapes, dtypes or grad modes kept changing, each a new compilation. Pad or bucket lengths (a fixed "
            "packed length), or compile with dynamic=True.",
            "On torch 2.12 and later torch._dynamo.config is per thread: a limit that the main thread raised does "
            "not hold in autograd's or a worker's thread. Give it as an option of the call, or set it in each.",
        ),
        precedence=75,
    ),
    Cause(
        "recompile-after-seal",
        "something compiled after compiling had been sealed",
        "compiling",
        (raised("RuntimeError", "Detected recompile when torch.compile stance is 'fail_on_recompile'"),),
        (
            "A shape, dtype or grad mode turned up that was not warmed. The message names the guard that failed.",
            "Add that shape to the warm-up, forward and backward, or pad to a shape that is there.",
        ),
        precedence=75,
    ),
    Cause(
        "kernel-compile-failed",
        "a kernel did not compile",
        "compiling",
        (
            raised("CompilationError", literals=("triton.compiler.errors.CompilationError", "CompilationError: at ")),
            raised("PTXASError", literals=("PTXASError",)),
            raised("CppCompileError", literals=("CppCompileError",)),
            line("ptxas fatal", r"^ptxas fatal"),
            line("Internal Triton PTX codegen error", r"Internal Triton PTX codegen error"),
        ),
        (
            "The message names the kernel and the line. A kernel of the program's own: correct it.",
            "A generated kernel, or ptxas that knows no such architecture: torch and triton do not fit the card; "
            "check that the environment's triton is the one that its torch asks for. After a compilation that was "
            "killed, also move the compile cache aside once.",
        ),
        precedence=65,
    ),
    Cause(
        "compiler-missing",
        "no C or C++ compiler, or Python's headers are missing",
        "compiling",
        (
            raised("RuntimeError", "Failed to find C compiler"),
            raised("InvalidCxxCompiler", literals=("InvalidCxxCompiler",)),
            raised("BackendCompilerFailed|InductorError", "No working C++ compiler found", "Failed to find C compiler"),
            line("Python.h: No such file", r"fatal error: Python\.h: No such file"),
            line(
                "No such file or directory: 'g++'",
                r"FileNotFoundError: .*No such file or directory: '(?:g\+\+|gcc|cc|clang\+*|ninja)'",
            ),
            line("No such file or directory: 'gcc'", r"FileNotFoundError: .*No such file or directory: '(?:gcc|cc)'"),
            line("No such file or directory: 'ninja'", r"FileNotFoundError: .*No such file or directory: 'ninja'"),
        ),
        (
            "torch.compile builds C or C++ at run time: on a GPU Triton's launcher, on a CPU every kernel.",
            "Install a compiler and the headers of the environment's Python at the place.",
        ),
        "orch exec {place} -- apt-get install -y gcc g++ python3-dev",
        precedence=78,
    ),
    Cause(
        "compile-cache-corrupt",
        "a file of the compile cache is broken",
        "compiling",
        (
            raised("JSONDecodeError", "Extra data", "Expecting value", "Unterminated string", frames=_CACHE),
            raised(
                "ImportError|OSError",
                "invalid ELF header",
                "file too short",
                literals=("invalid ELF header", "file too short"),
            ),
            raised("UnpicklingError|EOFError", literals=("UnpicklingError", "EOFError"), frames=_CACHE),
        ),
        (
            "A process was killed while it wrote there, or several wrote at once. Only that cache is affected.",
            "Move this cache aside and launch again: it is compiled anew.",
        ),
        retry=True,
        precedence=82,
    ),
    Cause(
        "compile-cache-unusable",
        "the compile cache cannot be written or is on a network file system",
        "compiling",
        (
            raised("PermissionError", "Permission denied", after=r"/(?:\.?triton|torchinductor\w*|inductor)\b"),
            line(
                ("Stale file handle", "Device or resource busy"), r"OSError: \[Errno (?:16|116)\].*(?:triton|inductor)"
            ),
        ),
        (
            "Cache folders belong to one user and to a local disk. A run as root first, then as another user, leaves "
            "folders that the second may not write.",
            "Set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to a folder of the user's own on a local disk.",
        ),
        precedence=76,
    ),
    Cause(
        "compile-worker-died",
        "a process of torch's parallel compilation died",
        "compiling",
        (
            raised(
                "BrokenProcessPool", literals=("BrokenProcessPool",), role="echo", frames=r"_inductor|compile_worker"
            ),
            line(
                "A compilation subprocess exited unexpectedly",
                r"A compilation subprocess exited unexpectedly",
                role="echo",
            ),
            raised("SubprocException", literals=("SubprocException",), role="echo"),
        ),
        (
            "Mostly the kernel killed it for want of host memory: each worker starts up to 32 compile processes.",
            "Launch again with TORCHINDUCTOR_COMPILE_THREADS=1 in the recipe's env, or give the container more memory.",
        ),
        "orch launch {recipe} --set env.TORCHINDUCTOR_COMPILE_THREADS=1",
        retry=True,
        precedence=60,
    ),
)
