"""What each shell is given and answers: the scripts, and the line that a script asks about.

A script calls `orch` with `_ORCH_COMPLETE` set to the shell's name, and reads one candidate a line from stdout, with a
tab and what it means behind it where the shell shows that; a line of `FILES` alone asks for names of files.
"""

from __future__ import annotations

import os
import re

from orchestrator.completion.words import Candidate, complete

FILES = "\t"  # no candidate begins with one

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")

# $2 is the word as bash sees it: what follows the last of COMP_WORDBREAKS, such as : or =
_BASH = r"""# bash completion of orch
_orch_complete() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == $'\t' ]]; then
            compopt -o default 2>/dev/null
            return
        fi
        COMPREPLY+=("$line")
    done < <(_ORCH_COMPLETE=bash "${1/#\~/$HOME}" "${COMP_LINE:0:COMP_POINT}" "$2" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o nosort -F _orch_complete orch 2>/dev/null || complete -F _orch_complete orch
"""

_ZSH = r"""#compdef orch
# zsh completion of orch
_orch() {
    local -a before whole open
    local line value
    before=("${(@Q)words[2,CURRENT-1]}")
    for line in "${(@f)$(_ORCH_COMPLETE=zsh ${(Q)words[1]/#\~/$HOME} "${before[@]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        if [[ $line == $'\t' ]]; then
            _files
            return
        fi
        value=${line%%$'\t'*}
        [[ -n $value ]] || continue
        if [[ $line == *$'\t'* ]]; then
            line=${value//:/\\:}:${line#*$'\t'}
        else
            line=${value//:/\\:}
        fi
        if [[ $value == *[=.] ]]; then open+=("$line"); else whole+=("$line"); fi
    done
    (( $#whole )) && _describe -V -t orch orch whole
    (( $#open )) && _describe -V -t orch-open orch open -S ''
    (( $#whole + $#open ))
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit -i
fi
if [[ ${funcstack[1]} == _orch ]]; then
    _orch "$@"  # autoloaded from fpath
else
    compdef _orch orch
fi
"""

_FISH = r"""# fish completion of orch
function __orch_complete
    set -l before (commandline -opc)
    set -l program $before[1]
    set -e before[1]
    set -l current (commandline -ct)
    set -l plain (string unescape -- "$current" 2>/dev/null)
    or set plain (string replace -r '^[\'"]' '' -- "$current")
    set -l found (_ORCH_COMPLETE=fish $program $before "$plain" 2>/dev/null)
    if test "$found" = \t
        __fish_complete_path "$plain"
    else if test -n "$found"
        printf '%s\n' $found
    end
end
complete -c orch -f -k -a '(__orch_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def answer(shell: str, words: list[str]) -> None:
    """Print what the shell's script asks for; nothing, where that is no shell of ours or anything goes wrong."""
    try:
        lines = _LINES[shell](words) if shell in _LINES else []
        text = "".join(f"{line}\n" for line in lines)
        with open(1, "wb", closefd=False) as out:
            out.write(text.encode("utf-8", "surrogateescape"))
    except Exception:
        if os.environ.get("ORCH_DEBUG"):
            raise


def _described(words: list[str]) -> list[str]:
    """For zsh and fish, which have split the line: the words, the last one as far as it is typed."""
    found = complete(words[:-1], words[-1] if words else "")
    if found is None:
        return [FILES]
    shown = [(_clean(word), _clean(help_)) for word, help_ in _once(found)]
    return [f"{word}\t{help_}" if help_ else word for word, help_ in shown]


def _bash(words: list[str]) -> list[str]:
    """For bash, which breaks words at more than blanks: the line up to the cursor, and its own last piece of it."""
    line, piece = words
    before, current, raw, quote = split(line)
    found = complete(before[1:], current)
    if found is None:
        return [FILES]
    # what of the word bash leaves alone, since its piece begins behind it
    head = len(raw) - len(piece) if raw.endswith(piece) else max(raw.rfind(one) for one in ":=") + 1
    if quote:
        head = 0  # inside quotes nothing breaks a word, and bash adds the quote itself
    plain = split(raw[:head])[1]
    rest = [word[len(plain) :] for word, _ in _once(found) if word.startswith(plain)]
    return [_clean(word) if quote else quoted(_clean(word)) for word in rest]


_LINES = {"bash": _bash, "zsh": _described, "fish": _described}


def _once(found: list[Candidate]) -> list[Candidate]:
    """Each word once, with what was said of it first."""
    kept: dict[str, str] = {}
    for word, help_ in found:
        kept.setdefault(word, help_)
    return list(kept.items())


def _clean(text: str) -> str:
    return _CONTROL.sub(" ", text)


def quoted(word: str) -> str:
    """The word as it is typed in a shell, with backslashes."""
    return word if _PLAIN.match(word) else re.sub(r"([^A-Za-z0-9_@%+=:,./\u0080-\uffff-])", r"\\\1", word)


def split(line: str) -> tuple[list[str], str, str, str]:
    """A line that is not whole yet: the words before the last one, the last one without and with its quotes, and the
    quote that is still open in it. Assignments before the command are no words of it."""
    words: list[str] = []
    word, raw, quote, inside = "", "", "", False
    at = 0
    while at < len(line):
        char = line[at]
        at += 1
        if not quote and char in " \t\n":
            if inside:
                words.append(word)
            word, raw, inside = "", "", False
            continue
        raw, inside = raw + char, True
        if char == "\\" and quote != "'":
            following = line[at : at + 1]
            if quote == '"' and following not in ('"', "\\", "$", "`"):
                word += char
            else:
                word, raw, at = word + following, raw + following, at + len(following)
        elif quote:
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "'\"":
            quote = char
        else:
            word += char
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*\+?=", words[0]):
        del words[0]
    return words, word, raw, quote
