"""Saves train states in the background and restores them onto any mesh. This module wraps Orbax: it names every way in
which a checkpoint can be missing, damaged or foreign, and never deletes what it did not write.

On disk a step is DIRECTORY/STEP with three items: `state` (one logical array for each leaf, under the leaf's path,
whatever Python classes or shardings held it), `data` (JSON: where each row of the data stands) and `meta` (JSON). Beside
them sizes.json lists the bytes of every file, so that a cut or lost file is found before anything is read.
"""

import dataclasses
import errno
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

from zerojax import tree
from zerojax.errors import UserError

ITEMS = ("state", "data", "meta")
SIZES = "sizes.json"
WRITTEN_BY_US = {*ITEMS, SIZES, "_CHECKPOINT_METADATA", "commit_success.txt"}
SHOWN = 3  # names listed in an error before "and N more"
UNFINISHED = "orbax-checkpoint-tmp"  # in the name of a step's directory until the step is complete
NO_SPACE = ("ENOSPC", "No space left", "EDQUOT", "quota exceeded")


class Checkpointer:
    """Keeps the newest `keep_last` checkpoints of a directory and the `keep_best` of lowest evaluation loss.

    All processes of a run call every method alike, on one directory that all of them reach.
    """

    def __init__(self, directory: str | os.PathLike, *, keep_last: int, keep_best: int):
        """Opens or creates `directory` and removes what a killed save left unfinished.

        Raises:
          UserError: the directory cannot be written, or holds things but no checkpoint.
        """
        self.directory = _open(directory)
        logging.getLogger("absl").addFilter(_is_worth_showing)
        ours = [step for step in _steps(self.directory) if _is_ours(self.directory / str(step))]
        self._losses = {step: _loss_on_disk(self.directory / str(step)) for step in ours}
        self._saving: int | None = None
        self._arrays = ocp.PyTreeCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": self._arrays,
                "data": ocp.JsonCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,  # reads no file of a step, which may be damaged
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_sizes),
                preservation_policy=_Keep(keep_last, keep_best, self._losses),
            ),
        )

    def save(
        self, step: int, state: Any, data_state: Mapping, *, meta: Mapping, eval_loss: float | None = None
    ) -> None:
        """Copies `state` to the host and writes it in the background; a step that is already saved is left alone.

        If the save before is still being written, this waits for it, so the host holds one copy of the state at most.

        Args:
          step: optimizer steps done.
          state: any pytree of arrays, random keys and numbers; its buffers may be donated afterwards.
          data_state: JSON, by row; each process gives its own rows and the checkpoint holds all of them.
          meta: JSON, the same on every process.
          eval_loss: ranks the checkpoint for `keep_best`; without it, or if NaN, it is kept only while it is new.

        Raises:
          UserError: this save or the one before failed; the last complete checkpoint is untouched.
        """
        if step in self._manager.all_steps() or (self.directory / str(step)).exists():
            return
        self.wait()
        loss = math.inf if eval_loss is None or math.isnan(eval_loss) else float(eval_loss)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_to_stored(state)),
            data=ocp.args.JsonSave(_merge_over_processes(data_state)),
            meta=ocp.args.JsonSave({"eval_loss": None if loss == math.inf else loss, "meta": _as_json(meta)}),
        )
        self._losses[step] = loss
        self._saving = step
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Returns when the save in progress, if any, is complete on disk.

        Raises:
          UserError: it failed, for instance because the disk is full.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_save(error) from error
        self._saving = None

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None if there is none."""
        return max(_steps(self.directory), default=None)

    def meta(self, step: int) -> dict:
        """Returns the `meta` saved with a step.

        Raises:
          UserError: the step is missing, foreign or damaged.
        """
        return _read_json(self._intact(step) / "meta")["meta"]

    def restore(
        self, step: int, abstract_state: Any, resizable: frozenset[str] = frozenset()
    ) -> tuple[Any, dict]:
        """Reads a step into the structure, dtypes and shardings of `abstract_state`, whatever shardings it was saved with.

        Args:
          step: a complete step.
          abstract_state: a pytree of ShapeDtypeStruct; a leaf without a sharding comes back as a numpy array.
          resizable: paths ("params/embed/embedding") of padded leaves, which are cut or filled with zeros at the end
            of each dim to the shape wanted.

        Returns:
          The state, and the data state of all processes.

        Raises:
          UserError: the step is missing, foreign or damaged, or its state is another model's.
        """
        self.wait()
        names_and_leaves = tree.flatten(abstract_state)
        wanted = {name: _stored_form(leaf) for name, leaf in names_and_leaves}
        for leaf in wanted.values():
            if leaf.sharding is not None:
                leaf.sharding.shard_shape(leaf.shape)  # raises here, where it cannot pass for a damaged file

        path = self._manager.directory / self._intact(step).name
        try:
            saved = self._arrays.metadata(path / "state").tree
            _check_same_state(path, saved, wanted, resizable)
            how = {name: _restore_args(leaf, name in resizable) for name, leaf in wanted.items()}
            args = ocp.args.PyTreeRestore(dict.fromkeys(wanted, 0), restore_args=how)
            stored, data_state = self._arrays.restore(path / "state", args=args), _read_json(path / "data")
        except (UserError, RuntimeError):  # JAX out of device memory is a RuntimeError
            raise
        except Exception as error:
            if any(isinstance(cause, MemoryError) for cause in _causes(error)):
                raise
            raise self._damaged(step, _first_line(error)) from error
        leaves = [_from_stored(stored[name], leaf) for name, leaf in names_and_leaves]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), data_state

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _failed_save(self, error: Exception) -> UserError:
        """Returns the error to raise, and forgets the step that did not make it to the disk."""
        step, self._saving = self._saving, None
        self._losses.pop(step, None)
        self._manager.reload()
        last = self.latest_step()
        safe = "no step is complete yet" if last is None else f"step {last} is complete and untouched"
        cause = "no space left on the disk" if _is_disk_full(error) else _first_line(error)
        way_out = "free space" if _is_disk_full(error) else "mend that"
        return UserError(
            f"{self.directory}: saving step {step} failed: {cause}; {safe}; {way_out} or choose another directory, "
            f"then run again"
        )

    def _write_sizes(self) -> None:
        """Lists the files of the step being saved; Orbax calls this when all are written and none is committed."""
        if jax.process_index() == 0:
            (path,) = self.directory.glob(f"{self._saving}.{UNFINISHED}*")
            (path / SIZES).write_text(json.dumps(_sizes(path)))

    def _intact(self, step: int) -> pathlib.Path:
        """Returns the directory of a step whose files are all there in full."""
        path, steps = self.directory / str(step), _steps(self.directory)
        if step not in steps:
            there = f"there are steps {', '.join(map(str, steps))}" if steps else "it holds no checkpoint"
            raise UserError(f"{self.directory}: no checkpoint of step {step}; {there}; choose one of these")
        if not any((path / item).exists() for item in ITEMS):
            raise UserError(f"{path}: not a checkpoint of zerojax; move it away or choose another directory")
        flaw = _flaw(path)
        if flaw is not None:
            raise self._damaged(step, flaw)
        return path

    def _damaged(self, step: int, flaw: str) -> UserError:
        """Returns the error to raise on a damaged step, which names the newest intact one before it."""
        path = self.directory / str(step)
        earlier = [number for number in reversed(_steps(self.directory)) if number < step]
        intact = next((number for number in earlier if _flaw(self.directory / str(number)) is None), None)
        way_out = (
            f"step {intact} is intact: delete or move {path} out of {self.directory} to resume from step {intact}"
            if intact is not None
            else "no earlier step is intact: choose another directory to start anew"
        )
        return UserError(f"{path}: checkpoint is damaged ({flaw}); {way_out}")


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Orbax's preservation policy: the newest, the best, and every step that is not in `losses`, hence not ours."""

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


def _open(directory: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path of a directory into which checkpoints can be written."""
    if "://" in str(directory):
        raise UserError(f"{directory}: checkpoints need a mounted file system; give a directory's path")
    path = pathlib.Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{path}: cannot hold checkpoints ({error.strerror}); choose another directory") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path}: not writable; give this user write access or choose another directory")
    others = [name for name in names if not name.isdigit() and UNFINISHED not in name]
    if others and not _steps(path):
        raise UserError(f"{path}: holds {_listed(others)} and no checkpoint; choose an empty or new directory")
    return path


def _steps(directory: pathlib.Path) -> list[int]:
    """Lists the complete steps, ascending; an incomplete one still has a temporary name."""
    names = [entry.name for entry in directory.iterdir() if entry.name.isdigit() and entry.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def _is_ours(path: pathlib.Path) -> bool:
    """Says whether a step's directory holds nothing but what a save writes, so that it may be deleted in its turn."""
    return {entry.name for entry in path.iterdir()} <= WRITTEN_BY_US


def _loss_on_disk(path: pathlib.Path) -> float:
    """Returns a step's evaluation loss; infinity where it has none or its file is damaged."""
    try:
        loss = _read_json(path / "meta")["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    return math.inf if loss is None else loss


def _sizes(path: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of each file of a step's items, by its path in the step."""
    files = [file for item in ITEMS for file in (path / item).rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


def _flaw(path: pathlib.Path) -> str | None:
    """Returns what is wrong with the files of a step, or None if all are there in full."""
    try:
        saved, found = json.loads((path / SIZES).read_text()), _sizes(path)
    except (OSError, ValueError) as error:
        return f"{SIZES}: {_first_line(error)}"
    for name, size in saved.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes, saved were {size}"
    return None


def _read_json(item: Any) -> dict:
    """Reads a JSON item of a step."""
    return json.loads((item / "metadata").read_text())


def _as_json(value: Mapping) -> dict:
    """Returns a copy as JSON gives it back, so that later changes to `value` do not reach the background write."""
    return json.loads(json.dumps(value))


def _merge_over_processes(rows: Mapping) -> dict:
    """Returns the union of the processes' dicts of rows."""
    if jax.process_count() == 1:
        return _as_json(rows)
    text = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(text.size))
    padded = multihost_utils.process_allgather(np.pad(text, (0, int(sizes.max()) - text.size)))
    merged: dict = {}
    for size, line in zip(sizes, padded):
        for row, state in json.loads(line[:size].tobytes()).items():
            assert merged.setdefault(row, state) == state, f"two processes give row {row} different data states"
    return merged


def _to_stored(state: Any) -> dict[str, Any]:
    """Returns {path: array}: keys as their data, numbers and process-local arrays as copies in numpy."""

    def convert(leaf: Any) -> Any:
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        is_local = not isinstance(leaf, jax.Array) or (jax.process_count() > 1 and leaf.is_fully_addressable)
        return np.array(leaf, dtype=tree.dtype_of(leaf)) if is_local else leaf

    named = tree.flatten(state)
    stored = {name: convert(leaf) for name, leaf in named}
    assert len(stored) == len(named), "two leaves of the state have one path"
    return stored


def _stored_form(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract array in which a leaf is stored, with the sharding wanted."""
    described = tree.abstract(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(described.shape, described.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=described.sharding)
    return described


def _from_stored(array: Any, leaf: Any) -> Any:
    """Returns a restored array in the form of the abstract leaf."""
    if not _is_key(leaf):
        return array
    found: list = []
    aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(array, impl=found[0])


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key)


def _restore_args(leaf: jax.ShapeDtypeStruct, is_resizable: bool) -> ocp.RestoreArgs:
    """Tells Orbax where a leaf goes."""
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=not is_resizable
    )


def _check_same_state(path: Any, saved: Mapping, wanted: Mapping, resizable: frozenset[str]) -> None:
    """Raises an error that names the leaves in which the saved state differs from the one wanted."""
    way_out = "the config's model differs from the checkpoint's: set it as it was saved or choose another directory"
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    if missing or unexpected:
        parts = [f"lacks {_listed(missing)}"] * bool(missing) + [f"has {_listed(unexpected)}"] * bool(unexpected)
        raise UserError(f"{path}: holds another state: it {' and '.join(parts)}; {way_out}")
    for name, leaf in wanted.items():
        there, here = tuple(saved[name].shape), tuple(leaf.shape)
        may_resize = name in resizable and leaf.sharding is not None and len(there) == len(here)
        if there != here and not may_resize:
            raise UserError(f"{name}: saved in {path} with shape {there}, wanted {here}; {way_out}")
        if saved[name].dtype != leaf.dtype:
            raise UserError(f"{name}: saved in {path} as {saved[name].dtype}, wanted {leaf.dtype}; {way_out}")


def _listed(names: Sequence[str]) -> str:
    """Joins the first few names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _first_line(error: BaseException) -> str:
    """Returns an error's kind and the start of its text."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_disk_full(error: BaseException) -> bool:
    """Says whether an error, or one that caused it, means that the disk is full."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return any(
        getattr(cause, "errno", None) in numbers or any(sign in str(cause) for sign in NO_SPACE)
        for cause in _causes(error)
    )


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Passes what other packages log, and from Orbax warnings and worse."""
    return record.levelno >= logging.WARNING or "/orbax/" not in record.pathname
