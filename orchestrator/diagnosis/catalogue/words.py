"""What the patterns of all themes are written with."""

from __future__ import annotations

import re

from orchestrator.diagnosis.model import Pattern, Role

# What may stand before a line's own words: a rank, a time, a level, a logger's or a worker's name. Everything
# else before an error's name means that the error is talked about, not raised.
PREFIX = (
    r"(?:\s*(?:"
    r"\[(?:rank|default)?\d+\]:?"  # torchrun
    r"|\([\w.]+ pid=\d+[^)]*\)"  # ray
    r"|[EF]\d{4} \d\d:\d\d:\d\d[\d.]* +\d+ [^\]\n]{1,120}\](?: \[[^\]\n]{1,60}\])*"  # glog
    r"|[\[(]?\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d[\d.,:]*(?:Z|[+-]\d\d:?\d\d)?[\])]?"
    r"|\[\d\d:\d\d:\d\d\]"
    r"|\[?(?:ERROR|CRITICAL|FATAL)\]?:?(?= )"
    r"|[\w.-]+:\d+:\d+ \[\d+\](?= NCCL| misc/)"  # NCCL's own lines
    r")\s?)*"
)


# What stands before a line of the kernel's log, by dmesg or by syslog.
KERNEL = r"^(?:\w{3} +\d+ [\d:]+ \S+ )?(?:kernel: ?)?(?:\[ *\d+\.\d+\] ?)?"


def exception(name: str, text: str = "") -> str:
    """A regular expression for the last line of a traceback: `module.name: …text…`, perhaps wrapped in others."""
    return rf"^(?:[A-Za-z_][\w.]*: ){{0,3}}(?:[A-Za-z_][\w.]*\.)?(?:{name})(?:: |$)" + (f".*?{text}" if text else "")


def raised(
    name: str,
    *texts: str,
    literals: tuple[str, ...] = (),
    role: Role = "cause",
    frames: str = "",
    after: str = "",
    without: str = "",
    when: str = "",
) -> Pattern:
    """An exception of that name (alternatives by `|`) whose message holds one of `texts` (plain words)."""
    words = "(?:" + "|".join(re.escape(text) for text in texts) + ")" if texts else ""
    return Pattern(
        literals or tuple(texts) or tuple(name.split("|")),
        exception(name, words),
        role,
        frames,
        after,
        without,
        when,
    )


def said(*texts: str, role: Role = "cause", after: str = "", without: str = "") -> Pattern:
    """The bundled trainer's last word, `error: …`, where it holds one of `texts` (plain words); also as an exception,
    in a program of somebody else's that uses parts of it."""
    words = "|".join(re.escape(text) for text in texts)
    regex = rf"^(?:error|(?:[\w.]+: )*(?:[\w.]+\.)?(?:TrainerError|DenseAttentionError)): .*?(?:{words})"
    return Pattern(tuple(texts), regex, role, "", after, without)


def line(literal: str | tuple[str, ...], regex: str, role: Role = "cause", **more: str) -> Pattern:
    """A line that is no exception's."""
    return Pattern((literal,) if isinstance(literal, str) else literal, regex, role, **more)


# A line of these words shows that what an error stopped went on, or was expected.
RECOVERED = re.compile(
    r"\b(?:retry(?:ing)?|retried|will (?:try|be tried) again|trying again|falling back|fall(?:s)? back|fallback|"
    r"skipp(?:ed|ing)|ignor(?:ed|ing)|continuing|recovered|reconnect(?:ed|ing)|halving|reducing (?:the )?batch|"
    r"(?:was|were|been) (?:caught|handled)|as expected|expected failure|attempt \d+(?: of |/)\d+)\b",
    re.IGNORECASE,
)
# A line of these words shows that training goes on.
PROGRESS = re.compile(
    r"(?:^|[\s\[{(,'\"])(?:step|steps|iter|iteration|epoch|batch|global_step)[\"']?[\s:=\[#]+\d+|"
    r"\bloss[\"']?[\s:=]+-?\d|\d+/\d+ \[\d+:\d\d<|\d(?:\.\d+)?\s?(?:it/s|s/it|tok(?:ens)?/s)",
    re.IGNORECASE,
)
FINISHED = re.compile(
    r"^\W*(?:training |run |job |all )?(?:done|finished|complete[d]?|success(?:ful(?:ly)?)?)\b\W*(?:[\w .,:/-]*)$|"
    r"\btraining (?:is )?(?:done|finished|complete[d]?)\b",
    re.IGNORECASE,
)
# Lines that programs write when they end, whatever way.
PARTING = re.compile(
    r"^\s*$|^wandb:|resource_tracker|^\s+warnings?\.warn|^\s+_warn|Warning: |^sys:1:|^[=\-*_~#]{4,}|^srun:|"
    r"destroy_process_group|^\+ |leaked semaphore|^Exception ignored|^swanlab|^slurmstepd|^CUDA kernel errors|"
    r"^For debugging consider|^Compile with|^Search for `|^Set TORCHDYNAMO|^You can suppress|^Failures:|"
    r"^\s+(?:time|host|rank|exitcode|error_file|traceback)\s*:|^To execute this test|"
    r"^\s*File \"|^(?:Current t|T)hread 0x|^Timeout \(|^\s*\[\d+\]:|^Root Cause|NOT_|^<NO_OTHER|FAILED$|^\^+$",
    re.IGNORECASE,
)
