"""Lists the configs that travel with the package. This module is the command line `zerojax configs`.

zerojax configs                  a line for each: its name, as in --config zero3, and what it is
zerojax configs zero3            prints the file, with its command, the devices that it needs and the result to expect
zerojax configs zero3 > mine.py  copies it, to be changed
"""

import argparse
import sys

from zerojax import configs
from zerojax.commands import arguments
from zerojax.errors import UserError


@arguments.command
def main() -> None:
    """Prints the list, or one file. A UserError prints one line and ends with status 2."""
    name = _parse(sys.argv[1:]).name
    if name is None:
        width = max(map(len, configs.names()))
        print("\n".join(f"{known:<{width}}  {configs.summary(known)}" for known in configs.names()))
        return
    if name not in configs.names():
        raise UserError(f"NAME: {name!r} is not a config; known: {', '.join(configs.names())}")
    print(configs.path(name).read_text(), end="")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax configs", "zerojax configs [NAME]", doc=__doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this config")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
