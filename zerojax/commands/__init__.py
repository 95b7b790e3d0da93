"""The sub-commands of `zerojax` that are not a room's own.

This room holds one module for each command line, registered in `zerojax/__main__.py`.
It holds no logic that a program would want: that lives in the rooms, and no module imports this one.
To add a command, add a module with `main()` here and a row to `COMMANDS`.
"""
