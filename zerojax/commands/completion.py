"""Prints a script with which a shell completes commands, flags and settings. This module is the command line `zerojax completion`.

zerojax completion bash > ~/.local/share/bash-completion/completions/zerojax     then open a new shell
zerojax completion zsh > ~/.zerojax.zsh                                          and in ~/.zshrc, after compinit: source ~/.zerojax.zsh
"""

import argparse
import pathlib
import sys

from zerojax import configs
from zerojax.commands import arguments

SHELLS = {"bash": "", "zsh": "autoload -Uz bashcompinit && bashcompinit\n"}  # what each needs before the script
# All flags and settings, which are read from code that imports JAX: `scripts/write_completion.py` writes it.
SCRIPT = pathlib.Path(__file__).with_suffix(".sh")


@arguments.command
def main() -> None:
    """Prints the script. A UserError prints one line and ends with status 2."""
    shell = _parse(sys.argv[1:]).shell
    print(SHELLS[shell] + script(), end="")


def script() -> str:
    """Returns the script with the names of the configs."""
    names = configs.names()
    flags = " ".join(f"--config={name}" for name in names)
    return SCRIPT.read_text().replace("@CONFIGS@", " ".join(names)).replace("@CONFIG_FLAGS@", flags)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax completion", "zerojax completion SHELL", doc=__doc__)
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=" or ".join(SHELLS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
