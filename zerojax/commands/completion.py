"""Prints a script with which a shell completes commands, flags and settings. This module is the command line `zerojax completion`.

zerojax completion bash > ~/.local/share/bash-completion/completions/zerojax     then open a new shell
zerojax completion zsh > ~/.zerojax.zsh                                          and in ~/.zshrc, after compinit: source ~/.zerojax.zsh
"""

import argparse
import contextlib
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence

from zerojax import configs
from zerojax.commands import arguments
from zerojax.trainer import settings

SHELLS = {"bash": "", "zsh": "autoload -Uz bashcompinit && bashcompinit\n"}  # what each needs before the script
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


@arguments.command
def main() -> None:
    """Prints the script. A UserError prints one line and ends with status 2."""
    shell = _parse(sys.argv[1:]).shell
    commands = re.findall(r"^  ([\w-]+)  ", _help(), re.MULTILINE)
    flags = {
        name: re.findall(r"^ +(?:-\w, )?--(?:\[no\])?([\w-]+)\b(?![.\w])", _help(name), re.MULTILINE)
        for name in commands
    }
    print(SHELLS[shell] + script(flags), end="")


def script(flags: Mapping[str, Sequence[str]]) -> str:
    """Returns the script for {command: the names of its flags}."""
    names, table = " ".join(configs.names()), settings.table()
    cases = {
        "configs\\ [!-]*": names,
        "configs\\ ": names,
        '*" --config="*': " ".join(f"--config={name}" for name in configs.names()),
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
    parts = {"@COMMANDS@": " ".join(flags), "@CONFIGS@": names, "@CASES@": "\n".join(lines)}
    return re.sub("|".join(parts), lambda found: parts[found[0]], _SCRIPT)


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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax completion", "zerojax completion SHELL", doc=__doc__)
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=" or ".join(SHELLS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
