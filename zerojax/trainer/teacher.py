"""The teacher of a run that learns its probabilities (`config.distill`). This module opens it, checks it, and reads its weights.

Only what makes logits of the teacher's last states, its head, is in the train state, as frozen weights below `params/teacher`: the loss
reads it. The rest is held beside the state (`tuning/lessons.py`). Both are sharded as the stage says.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zerojax import bounded, errors, files, tree
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import files as checkpoint_files
from zerojax.data import objectives
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import divergences
from zerojax.trainer import config as config_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer import settings as settings_lib
from zerojax.trainer import workdir
from zerojax.tree import PyTree

KEY = "teacher"  # of its head among the params, and of its last states in a batch
PLACE = "config.distill.teacher"
# Of a checkpoint, what is not read
_OTHERS = ("params", "opt_state", "rng", "step", "loss_scale", "fp8", "last_norm", "unsent_grads")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A decoder that stays as it is.

    Attributes:
      config: the settings with which its model is chosen.
      family, model: the model.
      source: the folder of transformers with its weights, or the newest checkpoint of a run.
    """

    config: settings_lib.Config
    family: family_lib.Family
    model: Any
    source: "folder_lib.Folder | RunStep"

    def abstract(self, dtype: DTypeLike) -> dict[str, Any]:
        """Returns its weights as ShapeDtypeStructs of this dtype."""
        return tree.of_dtype(family_lib.abstract_params(self.family.parts, self.model), dtype)

    def head(self, dtype: DTypeLike) -> dict[str, Any]:
        """Returns the part of them that makes logits of its last states."""
        return {name: part for name, part in self.abstract(dtype).items() if name in (self._projection, "logits_bias")}

    @property
    def _projection(self) -> str:
        return "embed" if self.model.tie_embeddings else "head"

    def scored(self, hidden: jax.Array, head: Mapping[str, Any]) -> divergences.Scored:
        """Returns what scores tokens, from its last states and its head's weights."""
        own = head[self._projection]
        kernel = own["embedding"].T if self.model.tie_embeddings else own["kernel"]
        bias = head["logits_bias"]["bias"] if "logits_bias" in head else None
        return divergences.Scored(
            hidden, kernel, bias=bias, cap=getattr(getattr(self.model, "scales", None), "logits_cap", 0.0)
        )

    def states(self, row: objectives.Row, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares its last states for a row of a batch."""
        return {KEY: jax.ShapeDtypeStruct((row["tokens"].shape[0] - 1, self.model.embed_dim), dtype)}

    def on_devices(self, mesh: Mesh, dtype: DTypeLike) -> ModelConfig:
        """Returns its model with the kernel of attention that suits these devices.

        Raises:
          UserError: its texts are shorter than the run's sequences.
        """
        return model_lib.choose(self.config, model_lib.source(self.config), mesh, dtype, 0)[1]

    def read(self, abstract: PyTree) -> PyTree:
        """Returns its weights, or some of them, for abstract leaves with shardings. All processes must call it.

        Raises:
          UserError: they cannot be read.
        """
        if isinstance(self.source, folder_lib.Folder):
            return folder_lib.read_params(self.source, abstract)
        run, step = self.source
        with checkpointer.Checkpointer(run / workdir.CHECKPOINTS) as saver:
            found, _ = saver.restore(step, {"params": abstract}, optional=_OTHERS)
        lacking = [path for path, leaf in tree.flatten(found["params"]) if isinstance(leaf, jax.ShapeDtypeStruct)]
        if lacking:
            raise UserError(
                f"{PLACE}: the checkpoint of {run} lacks {lacking[0]}, or holds it in another shape; name an export of that run"
            )
        return found["params"]

    @property
    def tokenized_by(self) -> "folder_lib.Folder | str":
        """Returns what has its tokenizer, for `check_tokenizer`."""
        return self.source if isinstance(self.source, folder_lib.Folder) else self.config.data.tokenizer

    @property
    def fingerprint(self) -> str:
        """Returns what tells it apart from another."""
        if isinstance(self.source, folder_lib.Folder):
            return folder_lib.fingerprint(self.source)
        step = self.source.folder / workdir.CHECKPOINTS / str(self.source.step)
        sums = step / checkpoint_files.SIZES  # the checksums of its files
        known = sums.read_bytes() if sums.is_file() else b""
        return hashlib.sha256(f"{self.model} {self.source.step}".encode() + known).hexdigest()[:16]


class RunStep(NamedTuple):
    """A checkpoint of a run's folder."""

    folder: pathlib.Path
    step: int


def open_teacher(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> Teacher | None:
    """Opens the teacher of a run with this student, if it has one. Reads no weights.

    Raises:
      UserError: there is no such model, or it is none that the student can learn from. The line says why.
    """
    if not (path := config.distill.teacher):
        return None
    files.check_path(path, PLACE)
    with errors.below(f"{PLACE}: "):
        found = _of_run(config, pathlib.Path(path)) if (pathlib.Path(path) / workdir.CHECKPOINTS).is_dir() else None
        found = found or _of_folder(config, path)
    for whose, one, shape in ((path, found.family, found.model), ("the student", family, model)):
        if one.is_encoder_decoder or not family_lib.writes_text(one, shape):
            raise UserError(
                f"{PLACE}: {whose} is no decoder that scores next tokens, as both models must; name another model"
            )
    if found.model.vocab_size != model.vocab_size:
        raise UserError(
            f"{PLACE}: {path} has a vocabulary of {found.model.vocab_size} ids, and the student one of {model.vocab_size}, so their "
            "probabilities cannot be compared; choose models of one vocabulary"
        )
    return found


def check_tokenizer(source: "folder_lib.Folder | str", tokenizer: tokenizer_lib.Tokenizer, place: str = PLACE) -> None:
    """Raises a UserError that begins with `place` if a model's folder, or a file, has a tokenizer with other ids than the run's."""
    other = source
    if isinstance(source, folder_lib.Folder):
        own = pathlib.Path(source.path) / huggingface.TOKENIZER
        other = str(own) if own.is_file() else ""
    if other and tokenizer_lib.load_tokenizer(str(other)).file(begins=True) != tokenizer.file(begins=True):
        raise UserError(
            f"{place}: that model has another tokenizer than this run, so the same ids are other words; set "
            f"--config.data.tokenizer={other}, or name another model"
        )


def _of_folder(config: settings_lib.Config, path: str) -> Teacher:
    opened = folder_lib.open_folder(path)
    own = settings_lib.ModelSettings(attention=config.model.attention)
    return Teacher(settings_lib.changed(config, {"init_from": path, "model": own}), opened.family, opened.model, opened)


def _of_run(config: settings_lib.Config, path: pathlib.Path) -> Teacher:
    """Returns the model of a run's folder, with its settings."""
    with files.reading(path / workdir.CONFIG_FILE, "name a run that has one"):
        saved = bounded.parse_json(bounded.read_bytes(path / workdir.CONFIG_FILE))
    with errors.below(f"{path / workdir.CONFIG_FILE}: "):
        own = config_lib.from_dict(_merged(settings_lib.defaults(), saved))
    if own.lora.is_on:
        raise UserError(
            f"the checkpoints of {path} hold adapters alone; export the run (export.format=huggingface), and name that"
        )
    with checkpointer.Checkpointer(path / workdir.CHECKPOINTS) as saver:
        step = saver.latest_step()
    if step is None:
        raise UserError(f"{path} holds no checkpoint; name another run, or a folder of transformers")
    opened = model_lib.source(own)
    family, model = model_lib.shape(own, opened)
    chosen = settings_lib.changed(
        config,
        {
            "init_from": own.init_from,
            "model": settings_lib.ModelSettings(
                own.model.preset, own.model.vocab_size or (0 if opened else model.vocab_size), own.model.num_layers,
                attention=config.model.attention,
            ),
            "data.tokenizer": own.data.tokenizer,
        },
    )  # fmt: skip
    return Teacher(chosen, family, model, RunStep(path, step))


def _merged(defaults: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved settings, with defaults for those that an older run did not have."""
    return {
        name: _merged(value, saved.get(name, {})) if isinstance(value, Mapping) else saved.get(name, value)
        for name, value in defaults.items()
    }
