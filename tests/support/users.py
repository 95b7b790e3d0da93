"""Types commands as a user does, in a folder away from the repository. This module is shared by the tests of whole jobs."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import runs

EXAMPLES = runs.ROOT / "examples"


@dataclasses.dataclass
class User:
    """A user in a folder, with the process that forks commands and the cache of what they compile."""

    folder: pathlib.Path
    commands: runs.Commands
    cache: pathlib.Path

    def zerojax(self, *words: Any, before: str = "", status: int = 0) -> runs.Command:
        """Runs `zerojax WORDS` after the Python code `before`, and checks its status."""
        if words[0] == "train":  # whose flags the process that forks has defined
            begin = f"os.chdir({str(self.folder)!r})\n{before}"
            done = self.commands(*map(str, words[1:]), before=begin, JAX_PLATFORMS="cpu")
            return self._checked(done, status)
        code = f"{before}\nsys.argv = {['zerojax', *map(str, words)]!r}\nfrom zerojax import __main__\n__main__.main()"
        return self._checked(self.commands.python(code, self.folder), status)

    def train(self, config: Any, workdir: str, *flags: str, **how: Any) -> dict[str, Any]:
        """Runs `zerojax train`, and returns what the run wrote."""
        self.zerojax("train", f"--config={config}", f"--workdir={workdir}", *flags, **how)
        return self.results(workdir)

    def python(self, script: pathlib.Path, *words: Any) -> runs.Command:
        """Runs `python SCRIPT WORDS`."""
        words = (script, *words)
        code = f"import runpy\nsys.argv = {list(map(str, words))!r}\nsys.path[0] = {str(script.parent)!r}"
        code = f"{code}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        return self._checked(self.commands.python(code, self.folder), 0)

    def launch(self, *words: Any) -> subprocess.CompletedProcess:
        """Runs `zerojax launch --num_gpus 2 -- python WORDS`."""
        words = ("-m", "zerojax", "launch", "--num_gpus=2", "--", sys.executable, *words)
        environ = runs.environment(self.cache)
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=runs.LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def results(self, workdir: str) -> dict[str, Any]:
        """Returns the losses by step that a run wrote, and the last value of everything else."""
        lines = [json.loads(line) for line in (self.folder / workdir / "metrics.jsonl").read_text().splitlines()]
        found: dict[str, Any] = {}
        for line in lines:
            found |= line
        return {**found, "losses": {line["step"]: line["loss"] for line in lines if "loss" in line}}

    def _checked(self, done: runs.Command, status: int) -> runs.Command:
        assert done.status == status, done.out + done.err
        return done
