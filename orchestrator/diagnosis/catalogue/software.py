"""The program itself and its environment."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised
from orchestrator.diagnosis.model import Cause

CAUSES = (
    Cause(
        "import-error",
        "a module is missing",
        "software",
        (
            raised("ModuleNotFoundError", "No module named", role="cause"),
            raised("ImportError", "cannot import name", "No module named", "attempted relative import"),
            line("No module named", r"^/\S*python\S*: (?:No module named|Error while finding module)"),
        ),
        (
            "The environment does not hold it, or holds another version. Add it to requirements.in, lock again, and "
            "launch: never install into the environment by hand.",
        ),
        precedence=55,
    ),
    Cause(
        "environment-drift",
        "the environment was changed, or its libraries do not fit each other",
        "software",
        (
            raised(
                "ImportError|OSError|AttributeError",
                "undefined symbol",
                "version `GLIBC",
                "version `CXXABI",
                "version `GLIBCXX",
                "cannot open shared object file",
                "libcudart.so",
                "DLL load failed",
                "file not found in wheel",
            ),
            raised(
                "RuntimeError",
                "operator torchvision::nms does not exist",
                "Detected that PyTorch and torchvision were compiled with different CUDA",
                "Detected that PyTorch and torchaudio were compiled with different CUDA",
            ),
            raised(
                "RuntimeError|ImportError",
                "module compiled against API version",
                "A module that was compiled using NumPy 1.x cannot be run",
                "numpy.dtype size changed, may indicate binary incompatibility",
                "numpy.core.multiarray failed to import",
            ),
            raised("ValueError", "numpy.dtype size changed"),
            raised("AttributeError", "'_OpNamespace' '", "object has no attribute 'nms'"),
            raised("ImportError", "is required for a normal functioning of this module"),
            line("environment", r"environment \S+ (?:is|was) (?:polluted|changed)|differs from its manifest"),
        ),
        (
            "Something was installed over it, or two packages were taken from different indexes. Build the "
            "environment anew from its lock; the last good combination comes back with rollback-env.",
        ),
        "orch rollback-env {recipe}",
        structured=("environment_polluted",),
        precedence=79,
    ),
    Cause(
        "python-syntax",
        "the program is not valid Python",
        "software",
        (raised("SyntaxError|IndentationError|TabError", literals=("SyntaxError", "IndentationError", "TabError")),),
        ("The lines above the message name file and line. A newer Python's syntax in an older Python reads so too.",),
        precedence=60,
    ),
    Cause(
        "usage-error",
        "the program was called the wrong way",
        "software",
        (
            line(": error: ", r"^[\w./-]+(?:\.py)?(?: \w+)?: error: "),
            line(("can't open file", "No such file or directory"), r"python\S*: can't open file"),
            raised(
                "ConfigError|ConfigKeyError|ConfigAttributeError|MissingMandatoryValue|ValidationError",
                role="cause",
                literals=(
                    "ConfigError",
                    "ConfigKeyError",
                    "ConfigAttributeError",
                    "MissingMandatoryValue",
                    "ValidationError",
                ),
            ),
            line(
                (": unknown setting `", ": `", "settings below it"),  # of the bundled trainer's configuration
                r"^(?:\S+\.ya?ml:\d+|--set): (?:unknown setting `|`[\w.]+` |[\w.]+: expected settings|not YAML: )",
            ),
            line("TrainerError", r"^(?:[\w.]+\.)?TrainerError: "),
        ),
        ("The message names the argument or the setting. Correct the recipe's command or settings.",),
        precedence=50,
    ),
    Cause(
        "program-not-started",
        "the program could not be started",
        "software",
        (
            line(": not found", r"^(?:/\S+|\w+): (?:line )?\d+: (?:exec: )?\S+: not found$"),
            line("command not found", r": command not found$"),
            line(
                ("cannot execute", "Exec format error"),
                r": cannot execute(?:: required file not found| binary file)|Exec format error",
            ),
        ),
        ("The program or its directory is not there, or is not for this machine. See the recipe's command.",),
        structured=("not_started", "exit_127"),
        precedence=58,
    ),
    Cause(
        "native-crash",
        "native code crashed",
        "software",
        (
            line("Segmentation fault", r"^(?:Fatal Python error: )?(?:.*: line \d+: +\d+ )?Segmentation fault"),
            line(
                "Fatal Python error",
                r"^Fatal Python error: (?:Segmentation fault|Bus error|Aborted|Illegal instruction|Floating)",
            ),
            line("terminate called", r"^terminate called", role="echo"),
            line(
                "*** Error in",
                r"(?:double free or corruption|free\(\): invalid|malloc\(\): |corrupted size|munmap_chunk)",
            ),
            line(
                ("double free or corruption", "free(): invalid pointer", "malloc(): "),
                r"^(?:double free or corruption|free\(\): invalid|malloc\(\): )",
            ),
            line("Aborted", r"^(?:.*: line \d+: +\d+ )?Aborted(?: \(core dumped\)|$| {4})"),
            line("core dumped", r"(?:Aborted|Illegal instruction|Bus error|Segmentation fault).*core dumped"),
        ),
        (
            "A C, C++ or CUDA library crashed: often two builds that do not fit, or a driver. With "
            "PYTHONFAULTHANDLER=1 in the recipe's env the Python line is shown.",
        ),
        "orch launch {recipe} --set env.PYTHONFAULTHANDLER=1",
        structured=("crash_signal",),
        precedence=46,
        family="cuda",
    ),
    Cause(
        "trainer-refused",
        "the trainer stopped with a message of its own",
        "software",
        (line("error: ", r"^error: .{12}", role="echo"),),
        ("The message says what is wrong, where, and what to do.",),
        precedence=12,
    ),
    Cause(
        "uncaught-exception",
        "the program raised an exception that nothing caught",
        "software",
        (),
        ("The traceback below is whole; its last line is the error, the line above it the place.",),
        precedence=10,
    ),
)
