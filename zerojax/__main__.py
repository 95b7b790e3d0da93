"""The command `zerojax`. This module starts one of its sub-commands. Each is a module that `python -m` also starts.

zerojax train --config configs/zero3.py         the same as: python -m zerojax.train --config configs/zero3.py
"""

import runpy
import sys

import zerojax
from zerojax import errors
from zerojax.launch import early

# name -> (module, which is imported only when chosen; help text)
COMMANDS = {
    "train": ("zerojax.train", "Trains a language model from a config."),
    "launch": ("zerojax.commands.launch", "Starts a command on every GPU of one or several hosts, and keeps it alive."),
    "doctor": ("zerojax.commands.doctor", "Checks hosts, devices, links and the disk before a long run."),
    "plan": ("zerojax.plan", "Reports the memory and communication of a run, without running it."),
    "data": ("zerojax.commands.data", "Shows the tokens of a run's examples, and what is learned of them."),
    "generate": ("zerojax.commands.generate", "Continues prompts with a model that transformers saved."),
    "serve": ("zerojax.commands.serve", "Answers requests over HTTP in the form of OpenAI's API."),
    "merge": ("zerojax.commands.merge", "Merges an adapter of PEFT into its model."),
    "migrate": ("zerojax.commands.migrate", "Translates a config of DeepSpeed or Accelerate."),
    "import-deepspeed": ("zerojax.commands.import_deepspeed", "Takes over a checkpoint of DeepSpeed."),
    "disk": ("zerojax.commands.disk", "Measures a disk, and predicts the step of a config that offloads to it."),
    "calibrate": (
        "zerojax.commands.calibrate",
        "Measures this machine's GPUs, for the times that zerojax plan foretells.",
    ),
    "report": ("zerojax.commands.report", "Describes this machine: versions, devices, links, targets, cache."),
    "config": ("zerojax.commands.config", "Asks a dozen questions and writes a config that runs."),
    "configs": ("zerojax.commands.configs", "Lists the configs that --config knows by name."),
    "completion": ("zerojax.commands.completion", "Prints a script with which bash or zsh completes this command."),
    "show": ("zerojax.commands.show", "Prints the card of a run, or compares two runs."),
    "verify": ("zerojax.commands.verify", "Proves that all stages, offloads and axes give the same losses here."),
    "verify-checkpoint": ("zerojax.commands.verify_checkpoint", "Checks the files of a run's checkpoints."),
}


def main() -> None:
    """Runs the named sub-command as `python -m MODULE` does. An unknown name ends with one line and status 2."""
    name, *arguments = sys.argv[1:] or [""]
    if name in ("-h", "--help", "help"):
        return _say(usage())
    if name == "--version":
        return _say(f"zerojax {zerojax.__version__}")
    if name not in COMMANDS:
        print(f"zerojax: {_refused(name)}; zerojax --help lists the commands", file=sys.stderr, flush=True)
        sys.exit(2)
    sys.argv[1:] = arguments
    early.import_jax(COMMANDS[name][0])
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


def _say(text: str) -> None:
    """Prints a text. If stdout takes none, as on a full disk, ends the process with one line and status 2."""
    try:
        print(text, flush=True)
    except OSError as error:
        print(f"zerojax: stdout: cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        sys.exit(2)


def usage() -> str:
    """Returns the list of sub-commands."""
    rows = [f"  {name:<19}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: zerojax COMMAND [flags]",
            "",
            *rows,
            "",
            "zerojax COMMAND --help lists the flags of a command. zerojax --version prints the version.",
        ]
    )


def _refused(name: str) -> str:
    """Returns the error for a name that is not a command."""
    if not name:
        return f"a command is missing; give one of {', '.join(COMMANDS)}"
    return f"{name!r} is not a command; {errors.choose(name, COMMANDS)}"


if __name__ == "__main__":
    main()
