"""Saves train states in the background and restores them onto any mesh. This module wraps Orbax.

A step holds three items. `state` holds one global array for each leaf under the leaf's path, independent of Python classes and
shardings. `data` is JSON: the position of each row in the data. `meta` is JSON; beside it are the evaluation loss, and the unpadded shapes
of padded leaves.
"""

import atexit
import contextlib
import dataclasses
import io
import json
import logging
import math
import operator
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from zerojax import errors, signatures, tree
from zerojax.checkpoint import files as step_files
from zerojax.checkpoint import in_file, logical
from zerojax.checkpoint import lock as lock_lib
from zerojax.errors import UserError
from zerojax.optim import pieces
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree

LOCK_FILE = ".lock"


def report_failed_writes_once() -> None:
    """Lets this process drop the errors of writes in flight when one write fails and Orbax closes its loop. The first error is raised.

    A command calls it. A program that saves decides itself about what Python prints of errors that nobody catches.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def first(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = first


class StateLayout(Protocol):
    """What is read of the `Partition` of a state, whose room this one does not import."""

    @property
    def abstract_state(self) -> State: ...

    @property
    def leaves(self) -> Mapping[str, Any]: ...

    @property
    def on_device(self) -> "StateLayout": ...


class Checkpointer:
    """Keeps the newest `keep_last` checkpoints of a directory and the `keep_best` with the lowest evaluation loss.

    All processes of a run must call every method in the same order, on one directory that all of them can reach. Any number of programs
    may read a directory. One may write it: the first save takes a lock, which `close` and the end of the process release. A method that
    reads a step raises a UserError if the step is missing, foreign or damaged.

    >>> with zerojax.Checkpointer("checkpoints", keep_last=2) as saver:
    ...     saver.save(step, state, partition=partition)
    ...     state, data_state = saver.restore(None, partition)  # of any stage and mesh
    """

    @signatures.checked
    def __init__(self, directory: str | os.PathLike[str], *, keep_last: int = 2, keep_best: int = 0, run_id: str = ""):
        """Opens or creates `directory`. The first save removes unfinished steps of killed saves.

        Args:
          directory: on a mounted file system. It may hold checkpoints, and nothing else.
          keep_last: the number of newest steps that a save leaves, 1 or more.
          keep_best: the number of steps with the lowest evaluation loss that it leaves in addition.
          run_id: names the run if its former processes are known to have ended; their lock is then taken over.

        Raises:
          UserError: a number is out of range, or the directory cannot be written, or holds other files and no checkpoint.
        """
        self._keep_last, self._keep_best = _count("keep_last", keep_last, 1), _count("keep_best", keep_best, 0)
        self.directory, self._run_id = step_files.open_directory(directory), run_id
        self._losses: dict[int, float] = {}
        self._saving, self._beside = -1, dict[str, bytes]()  # the last step saved, and the files beside its items
        self._is_sealed = True  # whether the last step saved is seen on disk, or failed
        self._intact: set[int] = set()  # steps whose contents were read and are as saved
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_worth_showing)
        self._arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=in_file.handlers())
        self._lock: lock_lib.Lock | None = None
        self._manager: ocp.CheckpointManager | None = None  # of the program that saves

    def __enter__(self) -> Self:
        """Returns itself; the end of the block closes it."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Closes it."""
        self.close()

    def save(
        self,
        step: int,
        state: State,
        data_state: Mapping | None = None,
        *,
        meta: Mapping | None = None,
        eval_loss: float | None = None,
        partition: StateLayout | None = None,
        card: str = "",
        batch: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Copies `state` to the host and writes it in the background. Does nothing if the step is saved already.

        Waits for an earlier save first, so that the host holds only one copy of the state. Leaves on a disk are read one at a time, and
        the save ends before this returns.

        Args:
          step: optimizer steps done.
          state: any pytree of arrays, random keys and numbers. Its buffers may be donated afterwards.
          data_state: JSON by row. Each process passes its own rows, and the checkpoint holds all rows.
          meta: JSON, the same on every process.
          eval_loss: ranks the checkpoint for `keep_best`. A checkpoint with None or NaN is kept only by its age.
          partition: the state's `Partition`. It is needed if leaves are padded (`indivisible="pad"`), to restore into another padding.
          card: the text of `run.json` in the step's folder, which nothing reads but people; "": none. Process 0 writes it.
          batch: arrays of the next batch by name, where `data_state` does not tell it; `Checkpointer.batch` reads what process 0 writes.

        Raises:
          UserError: this save or the previous one failed, another process writes the directory, something else has the step's name, or an
            argument cannot be saved. The last complete checkpoint is untouched.
        """
        step = _count("step", step, 0)
        if not signatures.is_of(partition, StateLayout | None):
            raise UserError(f"partition: must be the Partition of the state, and is {errors.shown(partition)}")
        tree.untraced(tree.undeleted(tree.with_arrays_alone(state)))
        padded = {} if partition is None else _padded_shapes(partition, state)
        rows, about = _as_json("data_state", data_state), _as_json("meta", meta)
        manager = self._open_to_write()
        self.wait()
        if os.path.lexists(self.directory / str(step)):
            step_files.intact(self.directory, step, step_files.NONE)
            return
        loss = _loss(eval_loss)
        beside = {"eval_loss": None if loss == math.inf else loss, "padded": padded}
        stored = logical.to_stored(state)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(stored),
            data=ocp.args.JsonSave(_merge_over_processes(rows)),
            meta=ocp.args.JsonSave({**beside, "meta": about}),
        )
        self._losses[step], self._saving, self._is_sealed = loss, step, False
        self._beside = {step_files.CARD: card.encode()} if card else {}
        if batch:
            held = io.BytesIO()
            np.savez(held, **batch)  # type: ignore[arg-type]
            self._beside[step_files.BATCH] = held.getvalue()
        try:
            manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed(error) from error
        if any(isinstance(leaf, in_file.InFile) for leaf in stored.values()):
            self.wait()  # the next step writes over them

    def wait(self) -> None:
        """Returns when the save in progress, if any, is complete on disk, where its files were read back and have checksums.

        Raises:
          UserError: the save failed, for instance because the disk is full.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            if not self._is_sealed and jax.process_index() == 0:
                step_files.seal(self.directory, self._saving)
            self._is_sealed = True
        except Exception as error:
            raise self._failed(error) from error

    def trim(self) -> None:
        """Deletes the steps that the last save was killed before it deleted. Leaves them where another process holds the lock."""
        steps, keep = self.steps(), _Keep(self._keep_last, self._keep_best, step_files.losses(self.directory))
        own = [step for step, is_kept in zip(steps, keep.are_kept(steps)) if not is_kept]
        agreed = json.loads(_gather(json.dumps(own))[0])  # before one is deleted
        with contextlib.suppress(UserError):
            for step in agreed:
                self._open_to_write().delete(step)

    def steps(self) -> list[int]:
        """Lists the complete steps, ascending."""
        return step_files.steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None if there is none."""
        return max(self.steps(), default=None)

    def latest_intact_step(self) -> int | None:
        """Returns the newest step whose files are all as saved, or None if there is none. Reads all files of the steps that it looks at."""
        self.wait()
        for step in reversed(self.steps()):
            with contextlib.suppress(UserError):
                self._checked(step)
                return step
        return None

    @signatures.checked
    def has_checksums(self, step: int) -> bool:
        """Returns whether a step was saved with checksums. If not, only the sizes of its files are checked."""
        self._checked(step)
        return step_files.has_checksums(self.directory, step)

    @signatures.checked
    def meta(self, step: int) -> dict:
        """Returns the `meta` saved with a step."""
        path = self._checked(step)
        with self._read(step):
            meta = step_files.read_json(path, "meta")["meta"]
        if not isinstance(meta, dict):
            raise step_files.damaged(self.directory, step, "meta is not a table")
        return meta

    @signatures.checked
    def data_state(self, step: int) -> dict:
        """Returns the `data_state` of all processes saved with a step."""
        path = self._checked(step)
        with self._read(step):
            return step_files.read_json(path, "data")

    @signatures.checked
    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Returns the `batch` saved with a step, {} if there is none."""
        path = self._checked(step) / step_files.BATCH
        if not path.exists():
            return {}
        with self._read(step), np.load(path, allow_pickle=False) as found:
            return dict(found)

    @signatures.checked
    def check(
        self, step: int, abstract_state: State, resizable: frozenset[str] = frozenset(), optional: Sequence[str] = ()
    ) -> dict:
        """Checks that `restore` can read the step, without reading an array. Takes its arguments and returns the data state."""
        path, *_ = self._find(step, abstract_state, resizable, optional)
        with self._read(step):
            return step_files.read_json(path, "data")

    @signatures.checked
    def restore(
        self,
        step: int | None,
        like: PyTree,
        resizable: frozenset[str] = frozenset(),
        optional: Sequence[str] = (),
        keep: Callable[[jax.Array, Any], Any] | None = None,
    ) -> tuple[Any, dict]:
        """Reads a step into the structure and shardings of `like`. The saved shardings may differ.

        Args:
          step: a complete step; None: the newest.
          like: a `Partition`, or a pytree of ShapeDtypeStruct, of which some may be in pieces. A leaf without a sharding is returned as
            a numpy array. Floating leaves are cast to the dtype of `like`. Padding is added or removed as a `Partition` says.
          resizable: paths ("params/embed/embedding") of padded leaves. Each of their dims is cut, or padded with zeros, at its end.
          optional: prefixes of paths ("loss_scale") of leaves that the step may lack, or may hold in excess or in another shape.
          keep: f(array, abstract leaf) that brings an array from host memory to where it lives, before the next is read. None: that of the
            `Partition`.

        Returns:
          The state, and the data state of all processes. Optional leaves that the step lacks stay abstract.

        Raises:
          UserError: the step is missing, foreign or damaged, or its state is of another model.
        """
        if step is None:
            self.wait()
            step = self.latest_step()
            if step is None:
                raise UserError(f"{self.directory}: holds no checkpoint to restore; save one first")
        abstract_state = like.abstract_state if _is_partition(like) else like
        leaves = tree.flatten(abstract_state, is_leaf=pieces.is_pieces)
        path, wanted, resized = self._find(step, like, resizable, optional)
        restored = {name: leaf for name, leaf in leaves if name not in wanted}
        # Leaves in pieces exist a second time while they are read, so these are read one at a time.
        if _is_partition(like) and keep is None and like.keeper is not None:
            keep = like.keeper(like)
        one_by_one = [n for n, leaf in leaves if n in wanted and (pieces.is_pieces(leaf) or (keep and _is_apart(leaf)))]
        others = [name for name in wanted if name not in one_by_one]
        for names in filter(None, [others, *([name] for name in one_by_one)]):
            with self._read(step):
                how = {name: _restore_args(wanted[name], name in resized) for name in names}
                args = ocp.args.PyTreeRestore(dict.fromkeys(names, 0), restore_args=how, partial_restore=True)
                stored = self._arrays.restore(step_files.Literal(path) / "state", args=args)
            for name, leaf in leaves:
                if name in names:
                    restored[name] = logical.from_stored(_resized(stored[name], wanted[name]), leaf)
                    if name in one_by_one and keep is not None:
                        restored[name] = jax.tree.map(keep, restored[name], leaf)
        with self._read(step):
            data_state = step_files.read_json(path, "data")
        structure = jax.tree.structure(abstract_state, is_leaf=pieces.is_pieces)
        return jax.tree.unflatten(structure, [restored[name] for name, _ in leaves]), data_state

    def _find(
        self, step: int, like: PyTree, resizable: frozenset[str], optional: Sequence[str]
    ) -> tuple[Any, dict[str, jax.ShapeDtypeStruct], frozenset[str]]:
        """Returns an intact step's path, the abstract leaves to read from it, and the paths of those whose shapes may differ."""
        self.wait()
        abstract_state = like.abstract_state if _is_partition(like) else like
        wanted = {name: logical.form(leaf) for name, leaf in tree.flatten(abstract_state, is_leaf=pieces.is_pieces)}
        path = self._checked(step)
        with self._read(step):
            saved = self._arrays.metadata(step_files.Literal(path) / "state").tree
            shapes = [{name: tuple(leaf.shape) for name, leaf in leaves.items()} for leaves in (wanted, saved)]
            fitting = {name for name in wanted.keys() & saved.keys() if shapes[0][name] == shapes[1][name]}
            below = tuple(f"{path}/" for path in optional)
            wanted, saved = (
                {name: leaf for name, leaf in leaves.items() if name in fitting or not f"{name}/".startswith(below)}
                for leaves in (wanted, saved)
            )
            before = self._saved_padding(path, step)
            here = _unpadded_shapes(like) if _is_partition(like) else {}
            resized = frozenset(
                name
                for name in (before.keys() | here.keys()) & wanted.keys() & saved.keys()
                if _is_same_but_for_padding(
                    tuple(saved[name].shape), before.get(name), wanted[name].shape, here.get(name)
                )
            )
            _check_same_state(path, saved, wanted, resizable | resized)
        return path, wanted, resizable | resized

    def _saved_padding(self, path: Any, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the unpadded shapes of the leaves that a step holds padded."""
        shapes = step_files.read_json(path, "meta").get("padded", {})
        if not isinstance(shapes, dict) or not all(isinstance(shape, list) for shape in shapes.values()):
            raise step_files.damaged(self.directory, step, "meta: padded is not a table of shapes")
        return {name: tuple(shape) for name, shape in shapes.items()}

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
        """Waits for the save in progress, ends the background threads and releases the lock. Raises as `wait` does.

        Steps may still be read, and a later save takes the lock again.
        """
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
            if self._lock is not None:
                self._lock.release()
            self._manager = self._lock = None
            _UNCLOSED.discard(self)

    def unlock(self) -> None:
        """Releases the lock without waiting for a save: for a process that ends at once."""
        _UNCLOSED.discard(self)
        if self._lock is not None:
            self._lock.release()

    def _open_to_write(self) -> ocp.CheckpointManager:
        """Takes the directory's lock and removes unfinished steps, once.

        Raises:
          UserError: another process holds the lock.
        """
        if self._manager is not None:
            return self._manager
        refusal = None
        if jax.process_index() == 0:
            try:
                way_out = "save to another directory; any program may read"
                self._lock = lock_lib.take(self.directory / LOCK_FILE, str(self.directory), way_out, self._run_id)
            except UserError as error:
                refusal = str(error)
        refusal = _first_over_processes(refusal)
        if refusal is not None:
            raise UserError(refusal)
        _UNCLOSED.add(self)
        self._losses = step_files.losses(self.directory)
        jsons = {"data": ocp.JsonCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            step_files.Literal(self.directory),
            item_handlers={"state": self._arrays, **jsons},
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,  # reads no file of a step, which may be damaged
                preservation_policy=_Keep(self._keep_last, self._keep_best, self._losses),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._complete, barrier_sync_fn=_barrier()),
            ),
        )
        return self._manager

    def _complete(self) -> None:
        """Reads back the step being saved. Orbax calls this after writing a step, before committing it and deleting older ones."""
        if jax.process_index() == 0:
            step_files.read_back(self.directory, self._saving, self._beside)

    def _failed(self, error: Exception) -> UserError:
        """Returns the error to raise, and forgets the step that was not saved."""
        self._losses.pop(self._saving, None)
        self._is_sealed = True
        if self._manager is not None:
            self._manager.reload()  # Orbax has already forgotten the steps that this save would have replaced
        last, is_full = self.latest_step(), errors.is_disk_full(error)
        safe = "no step is complete yet" if last is None else f"step {last} is complete and untouched"
        cause = "no space left on the disk; free some" if is_full else f"{_brief(error)}; fix that"
        return UserError(
            f"{self.directory}: saving step {self._saving} failed: {cause} or choose another directory, "
            f"then run again; {safe}"
        )


_UNCLOSED: set[Checkpointer] = set()  # those that have saved


def _close_at_the_end() -> None:
    """Closes what a program has not: it ended while a save was in progress, which would be lost."""
    for checkpointer in list(_UNCLOSED):
        try:
            checkpointer.close()
        except UserError as error:
            print(error, file=sys.stderr)


# Orbax's threads start others, which Python refuses once it runs the functions of `atexit`. Those of `threading` come before.
getattr(threading, "_register_atexit", atexit.register)(_close_at_the_end)


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
        return self.are_kept([info.step for info in checkpoints])

    def are_kept(self, steps: Sequence[int]) -> list[bool]:
        """Returns for each of these steps, ascending, whether it is kept."""
        ours = [step for step in steps if step in self.losses]
        ranked = sorted((self.losses[step], -step) for step in ours if self.losses[step] < math.inf)
        kept = {*ours[-self.keep_last :], *(-negative for _, negative in ranked[: self.keep_best])}
        return [step in kept or step not in self.losses for step in steps]


def _count(name: str, value: Any, least: int) -> int:
    """Returns a whole number of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UserError(f"{name}: must be a whole number of at least {least}, and is {value!r}")
    return number


def _is_partition(like: PyTree) -> bool:
    """Returns whether a value is a `Partition`, whose room this one does not import."""
    return hasattr(like, "abstract_state") and hasattr(like, "placements")


def _is_apart(leaf: Leaf) -> bool:
    """Returns whether an abstract leaf is restored to a memory other than its devices' own."""
    kind = getattr(leaf.sharding, "memory_kind", None)
    return kind is not None and kind != next(iter(leaf.sharding.device_set)).default_memory().kind


def _unpadded_shapes(partition: StateLayout) -> dict[str, tuple[int, ...]]:
    """Returns the unpadded shape of each padded leaf."""
    return {path: tuple(leaf.shape) for path, leaf in partition.on_device.leaves.items() if leaf.padding}


def _padded_shapes(partition: StateLayout, state: State) -> dict[str, tuple[int, ...]]:
    """Returns the unpadded shape of each padded leaf of a state.

    Raises:
      UserError: the state is not one of the partition.
    """
    stored = {path: leaf.shape for path, leaf in tree.flatten(partition.abstract_state, is_leaf=pieces.is_pieces)}
    for path, leaf in tree.flatten(state, is_leaf=pieces.is_pieces):
        if stored.get(path) != np.shape(leaf):
            own = f"has shape {np.shape(leaf)}, and {stored[path]} there" if path in stored else "is not in it"
            raise UserError(f"save: {path} {own}; pass the partition that the state was sharded by")
    return _unpadded_shapes(partition)


def _is_same_but_for_padding(
    saved: tuple[int, ...], saved_unpadded: tuple | None, wanted: tuple[int, ...], wanted_unpadded: tuple | None
) -> bool:
    """Returns whether a saved leaf and a wanted one are the same without their padding. None: not padded, as far as is known."""
    before, here = saved_unpadded or saved, wanted_unpadded or wanted
    return before == here or (saved_unpadded is None and saved == wanted)


def _resized(array: Any, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns a numpy array cut or padded to its wanted shape; Orbax resizes the others."""
    if not isinstance(array, np.ndarray) or array.shape == wanted.shape:
        return array
    cut = array[tuple(map(slice, wanted.shape))]
    return np.pad(cut, [(0, want - have) for want, have in zip(wanted.shape, cut.shape)])


def _loss(value: Any) -> float:
    """Returns an evaluation loss by which steps are ranked: infinity for None and NaN."""
    try:
        number = math.inf if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"eval_loss: must be a number, and is {errors.shown(value)}") from error
    return math.inf if math.isnan(number) else number


def _as_json(name: str, value: Mapping | None) -> dict:
    """Returns a copy through JSON, so that later changes to `value` do not reach the background write; {} of None."""
    try:
        if not isinstance(value, Mapping | None):
            raise TypeError(f"it is no dict, but {errors.shown(value)}")
        return json.loads(json.dumps(value or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name}: is saved as JSON, and is not fit for it ({error}); pass numbers, texts, lists and dicts"
        ) from error


def _barrier() -> Callable[..., None] | None:
    """Returns the barrier at which Orbax's threads wait for other processes; None for one process, which has none.

    After its part of a save has failed, a thread of Orbax waits for the others before it raises the error. They wait for it at another
    barrier, for minutes. So a barrier raises an error that is on its way.
    """
    if jax.process_count() == 1:
        return None
    waits = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if (error := sys.exception()) is not None:
            raise error
        waits(key=key, timeout_ms=timeout_ms)

    return barrier


def _merge_over_processes(rows: Mapping) -> dict:
    """Returns the union of the processes' dicts of rows."""
    merged: dict = {}
    for text in _gather(json.dumps(rows)):
        for row, state in json.loads(text).items():
            if merged.setdefault(row, state) != state:
                raise UserError(f"data_state: processes disagree on {row}; give each process rows of its own")
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


def _check_same_state(path: Any, saved: Mapping, wanted: Mapping, resizable: frozenset[str]) -> None:
    """Raises an error that names the leaves in which the saved and the wanted state differ."""
    way_out = "the model or its optimizer differs from the checkpoint's; set them as saved or choose another directory"
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    lacks = f"lacks {step_files.listed(missing)}" if missing else ""
    has = f"has {step_files.listed(unexpected)}" if unexpected else ""
    if lacks or has:
        raise UserError(f"{path}: its state {' and '.join(filter(None, (lacks, has)))}; {way_out}")
    for name, leaf in wanted.items():
        there, here = tuple(saved[name].shape), tuple(leaf.shape)
        may_resize = name in resizable and len(there) == len(here)
        if there != here and not may_resize:
            is_longer = len(there) == len(here) and all(saved >= want for saved, want in zip(there, here))
            hint = ", or, if it was saved padded, save it with partition=" if is_longer else ""
            raise UserError(f"{name}: saved in {path} with shape {there}, wanted {here}; {way_out}{hint}")
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
