"""Writes what a shell completes, the flags of all commands and the settings with their values, for `zerojax completion`.

python scripts/write_completion.py [FILE]      writes zerojax/commands/completion.sh, or FILE
"""

import contextlib
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Mapping, Sequence

from zerojax.commands import completion
from zerojax.trainer import settings

# Bash splits a word at "=", and zsh does not: `word` is the whole of it, and `cut` the part that a completion does not repeat.
_SCRIPT = """# Completes zerojax in bash and zsh. Written by `zerojax completion`.
_zerojax() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" cut="" known=""
  if [[ $word == "=" ]]; then cut="$before="; word="$cut"
  elif [[ $before == "=" ]]; then cut="${COMP_WORDS[COMP_CWORD-2]}="; word="$cut$word"
  fi
  if [[ $COMP_CWORD -eq 1 ]]; then known="@COMMANDS@"
  elif [[ $before == --config && -z $cut ]]; then known="@CONFIGS@"
  else
    case "${COMP_WORDS[1]} $word" in
@CASES@
    esac
  fi
  COMPREPLY=($(compgen -W "$known" -- "$word"))
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && type compopt >/dev/null 2>&1; then compopt -o nospace; fi
  COMPREPLY=("${COMPREPLY[@]#"$cut"}")
}
complete -o default -F _zerojax zerojax
"""


def main() -> None:
    pathlib.Path(*sys.argv[1:] or [completion.SCRIPT]).write_text(script(flags()))


def flags() -> dict[str, list[str]]:
    """Returns {command: the names of its flags}."""
    commands = re.findall(r"^  ([\w-]+)  ", _help(), re.MULTILINE)
    flag = re.compile(r"^ +(?:-\w, )?--(?:\[no\])?([\w-]+)\b(?![.\w])", re.MULTILINE)
    return {name: flag.findall(_help(name)) for name in commands}


def script(flags: Mapping[str, Sequence[str]]) -> str:
    """Returns the script for {command: the names of its flags}."""
    table = settings.table()
    cases = {
        "configs\\ [!-]*": "@CONFIGS@",
        "configs\\ ": "@CONFIGS@",
        '*" --config="*': "@CONFIG_FLAGS@",
    }
    for place, setting in table.items():
        values = ("True", "False") if isinstance(setting.default, bool) else setting.choices
        if values:
            cases[f'*" --config.{place}="*'] = " ".join(f"--config.{place}={value}" for value in values)
    cases['*" --"*=*'] = ""
    cases['*" --config."*'] = " ".join(
        f"--config.{place}=" for place, setting in table.items() if setting.default is not None
    )
    cases |= {f"{name}\\ -*": " ".join(f"--{flag}" for flag in dict.fromkeys(found)) for name, found in flags.items()}
    lines = [f'      {pattern}) known="{words}" ;;' for pattern, words in cases.items()]
    return _SCRIPT.replace("@COMMANDS@", " ".join(flags)).replace("@CASES@", "\n".join(lines))


def _help(*words: str) -> str:
    """Returns what `zerojax WORDS --help` prints, in a child of this process, which has imported most of the library."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.dup2(writer, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  the parent's may be that of a file, and would seek in it
            sys.argv = ["zerojax", *words, "--help"]
            # SystemExit, and whatever else: no code of the parent may run here
            with contextlib.suppress(BaseException):
                runpy.run_module("zerojax", run_name="__main__", alter_sys=True)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


if __name__ == "__main__":
    main()
