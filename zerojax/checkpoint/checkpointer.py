"""Saves train states in the background and restores them onto any mesh. This module wraps Orbax.

A step holds three items. `state` holds one global array for each leaf under the leaf's path, independent of Python classes and
shardings. `data` is JSON: the position of each row in the data. `meta` is JSON.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from zerojax import errors, tree
from zerojax.checkpoint import files as step_files
from zerojax.checkpoint import logical
from zerojax.errors import UserError


class Checkpointer:
    """Keeps the newest `keep_last` checkpoints of a directory and the `keep_best` with the lowest evaluation loss.

    All processes of a run must call every method in the same order, on one directory that all of them can reach.
    """

    def __init__(self, directory: str | os.PathLike, *, keep_last: int, keep_best: int):
        """Opens or creates `directory` and removes unfinished steps of killed saves.

        Raises:
          UserError: the directory cannot be written, or holds other files and no checkpoint; or `keep_last` is below 1 or `keep_best`
            negative, which would delete what was just saved.
        """
        for name, value, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{name}: must be a whole number of at least {least}, and is {errors.shown(value)}")
        self.directory = step_files.open_directory(directory)
        self._losses = step_files.losses(self.directory)
        self._saving = -1  # the last step saved
        self._is_sealed = True  # whether the last step saved is seen on disk, or failed
        self._intact: set[int] = set()  # steps whose contents were read and are as saved
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_worth_showing)
        jsons = {"data": ocp.JsonCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._arrays = ocp.PyTreeCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={"state": self._arrays, **jsons},
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,  # reads no file of a step, which may be damaged
                preservation_policy=_Keep(keep_last, keep_best, self._losses),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._complete),
            ),
        )

    def save(
        self, step: int, state: Any, data_state: Mapping, *, meta: Mapping, eval_loss: float | None = None
    ) -> None:
        """Copies `state` to the host and writes it in the background. Does nothing if the step is saved already.

        Waits for an earlier save first, so that the host holds only one copy of the state.

        Args:
          step: optimizer steps done.
          state: any pytree of arrays, random keys and numbers. Its buffers may be donated afterwards.
          data_state: JSON by row. Each process passes its own rows, and the checkpoint holds all rows.
          meta: JSON, the same on every process.
          eval_loss: ranks the checkpoint for `keep_best`. A checkpoint with None or NaN is kept only by its age.

        Raises:
          UserError: this save or the previous one failed, or something else has the step's name. The last complete checkpoint is
            untouched.
        """
        self.wait()
        if os.path.lexists(self.directory / str(step)):
            step_files.intact(self.directory, step, step_files.NONE)
            return
        loss = math.inf if eval_loss is None or math.isnan(eval_loss) else float(eval_loss)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(logical.to_stored(state)),
            data=ocp.args.JsonSave(_merge_over_processes(data_state)),
            meta=ocp.args.JsonSave({"eval_loss": None if loss == math.inf else loss, "meta": _as_json(meta)}),
        )
        self._losses[step], self._saving, self._is_sealed = loss, step, False
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns when the save in progress, if any, is complete on disk, where its files were read back and have checksums.

        Raises:
          UserError: the save failed, for instance because the disk is full.
        """
        try:
            self._manager.wait_until_finished()
            if not self._is_sealed and jax.process_index() == 0:
                step_files.seal(self.directory, self._saving)
            self._is_sealed = True
        except Exception as error:
            raise self._failed(error) from error

    def steps(self) -> list[int]:
        """Lists the complete steps, ascending."""
        return step_files.steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None if there is none."""
        return max(self.steps(), default=None)

    def has_checksums(self, step: int) -> bool:
        """Returns whether a step was saved with checksums. If not, only the sizes of its files are checked.

        Raises:
          UserError: the step is missing, foreign or damaged.
        """
        self._checked(step)
        return step_files.has_checksums(self.directory, step)

    def meta(self, step: int) -> dict:
        """Returns the `meta` saved with a step.

        Raises:
          UserError: the step is missing, foreign or damaged.
        """
        path = self._checked(step)
        with self._read(step):
            meta = step_files.read_json(path, "meta")["meta"]
        if not isinstance(meta, dict):
            raise step_files.damaged(self.directory, step, "meta is not a table")
        return meta

    def check(
        self, step: int, abstract_state: Any, resizable: frozenset[str] = frozenset(), optional: Sequence[str] = ()
    ) -> dict:
        """Checks that `restore` can read the step, without reading an array. Takes its arguments and returns the data state."""
        path, _ = self._find(step, abstract_state, resizable, optional)
        with self._read(step):
            return step_files.read_json(path, "data")

    def restore(
        self, step: int, abstract_state: Any, resizable: frozenset[str] = frozenset(), optional: Sequence[str] = ()
    ) -> tuple[Any, dict]:
        """Reads a step into the structure and shardings of `abstract_state`. The saved shardings may differ.

        Args:
          step: a complete step.
          abstract_state: a pytree of ShapeDtypeStruct. A leaf without a sharding is returned as a numpy array. Floating leaves are
            cast to the dtype of `abstract_state`.
          resizable: paths ("params/embed/embedding") of padded leaves. Each of their dims is cut, or padded with zeros, at its end.
          optional: prefixes of paths ("loss_scale") of leaves that the step may lack, or may hold in excess.

        Returns:
          The state, and the data state of all processes. Optional leaves that the step lacks stay abstract.

        Raises:
          UserError: the step is missing, foreign or damaged, or its state is of another model.
        """
        leaves = tree.flatten(abstract_state)
        path, wanted = self._find(step, abstract_state, resizable, optional)
        with self._read(step):
            how = {name: _restore_args(leaf, name in resizable) for name, leaf in wanted.items()}
            args = ocp.args.PyTreeRestore(dict.fromkeys(wanted, 0), restore_args=how, partial_restore=True)
            stored = self._arrays.restore(path / "state", args=args)
            data_state = step_files.read_json(path, "data")
        restored = [logical.from_stored(stored[name], leaf) if name in stored else leaf for name, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), restored), data_state

    def _find(
        self, step: int, abstract_state: Any, resizable: frozenset[str], optional: Sequence[str]
    ) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """Returns an intact step's path, and the abstract leaves to read from it."""
        self.wait()
        wanted = {name: logical.form(leaf) for name, leaf in tree.flatten(abstract_state)}
        path = self._manager.directory / self._checked(step).name
        with self._read(step):
            saved = self._arrays.metadata(path / "state").tree
            wanted = {name: leaf for name, leaf in wanted.items() if name in saved or not _is_below(name, optional)}
            saved = {name: leaf for name, leaf in saved.items() if name in wanted or not _is_below(name, optional)}
            _check_same_state(path, saved, wanted, resizable)
        return path, wanted

    def _checked(self, step: int) -> pathlib.Path:
        """Returns the path of an intact step. Each process reads its share of the files, once, and learns what the others found."""
        share = step_files.NONE if step in self._intact else slice(jax.process_index(), None, jax.process_count())
        path = step_files.intact(self.directory, step, share, agree=_first_over_processes)
        self._intact.add(step)
        return path

    @contextlib.contextmanager
    def _read(self, step: int) -> Iterator[None]:
        """Turns errors in reading a step into a UserError: the step is damaged."""
        try:
            yield
        except (UserError, RuntimeError):  # JAX raises RuntimeError when a device is out of memory
            raise
        except Exception as error:
            if any(isinstance(cause, MemoryError) for cause in errors.causes(error)):
                raise
            raise step_files.damaged(self.directory, step, _brief(error)) from error

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _complete(self) -> None:
        """Reads back the step being saved. Orbax calls this after writing a step, before committing it and deleting older ones."""
        if jax.process_index() == 0:
            step_files.read_back(self.directory, self._saving)

    def _failed(self, error: Exception) -> UserError:
        """Returns the error to raise, and forgets the step that was not saved."""
        self._losses.pop(self._saving, None)
        self._is_sealed = True
        self._manager.reload()  # Orbax has already forgotten the steps that this save would have replaced
        last, is_full = self.latest_step(), errors.is_disk_full(error)
        safe = "no step is complete yet" if last is None else f"step {last} is complete and untouched"
        cause = "no space left on the disk; free some" if is_full else f"{_brief(error)}; fix that"
        return UserError(
            f"{self.directory}: saving step {self._saving} failed: {cause} or choose another directory, "
            f"then run again; {safe}"
        )


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Orbax's preservation policy: keeps the newest, the best, and any step not in `losses`, which zerojax did not write.

    Orbax's own policies do not work here. `BestN` ranks by Orbax's item `metrics`, which these steps lack, and keeps every step
    up to N of them. `LatestN` also counts foreign steps.
    """

    keep_last: int
    keep_best: int
    losses: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        ours = [step for step in steps if step in self.losses]
        ranked = sorted((self.losses[step], -step) for step in ours if self.losses[step] < math.inf)
        kept = {*ours[-self.keep_last :], *(-negative for _, negative in ranked[: self.keep_best])}
        return [step in kept or step not in self.losses for step in steps]


def _as_json(value: Mapping) -> dict:
    """Returns a copy through JSON, so that later changes to `value` do not reach the background write."""
    return json.loads(json.dumps(value))


def _merge_over_processes(rows: Mapping) -> dict:
    """Returns the union of the processes' dicts of rows."""
    merged: dict = {}
    for text in _gather(json.dumps(rows)):
        for row, state in json.loads(text).items():
            assert merged.setdefault(row, state) == state, f"processes disagree on the data state of row {row}"
    return merged


def _first_over_processes(flaw: str | None) -> str | None:
    """Returns the flaw that the first process with one has found, or None."""
    return next(filter(None, map(json.loads, _gather(json.dumps(flaw)))), None)


def _gather(text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    line = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(line.size))
    padded = multihost_utils.process_allgather(np.pad(line, (0, int(sizes.max()) - line.size)))
    return [line[:size].tobytes().decode() for size, line in zip(sizes, padded)]


def _restore_args(leaf: jax.ShapeDtypeStruct, is_resizable: bool) -> ocp.RestoreArgs:
    """Returns Orbax's arguments to restore a leaf."""
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=not is_resizable
    )


def _is_below(path: str, starts: Sequence[str]) -> bool:
    return any(path == start or path.startswith(f"{start}/") for start in starts)


def _check_same_state(path: Any, saved: Mapping, wanted: Mapping, resizable: frozenset[str]) -> None:
    """Raises an error that names the leaves in which the saved and the wanted state differ."""
    way_out = "the config's model differs from the checkpoint's; set it as saved or choose another directory"
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    lacks = f"lacks {step_files.listed(missing)}" if missing else ""
    has = f"has {step_files.listed(unexpected)}" if unexpected else ""
    if lacks or has:
        raise UserError(f"{path}: its state {' and '.join(filter(None, (lacks, has)))}; {way_out}")
    for name, leaf in wanted.items():
        there, here = tuple(saved[name].shape), tuple(leaf.shape)
        may_resize = name in resizable and leaf.sharding is not None and len(there) == len(here)
        if there != here and not may_resize:
            raise UserError(f"{name}: saved in {path} with shape {there}, wanted {here}; {way_out}")
        are_floats = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (saved[name].dtype, leaf.dtype))
        if saved[name].dtype != leaf.dtype and not are_floats:
            raise UserError(f"{name}: saved in {path} as {saved[name].dtype}, wanted {leaf.dtype}; {way_out}")


def _brief(error: BaseException) -> str:
    """Returns an error's type and the start of its text, in one line."""
    return f"{type(error).__name__}: {errors.one_line(error, 160)}"


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Passes records of other packages, and Orbax's warnings without tracebacks: Orbax also raises those errors."""
    is_orbax = "/orbax/" in record.pathname or (record.name == "asyncio" and "/orbax/" in record.getMessage())
    return not is_orbax or (record.levelno >= logging.WARNING and not record.exc_info)
