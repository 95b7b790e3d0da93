"""Writes the results of a run after its last step. This module samples text, plots the losses and exports the weights."""

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from zerojax import errors
from zerojax.data import mixture
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import splits, templates
from zerojax.inference import generate, sampling
from zerojax.interop import deltas, hub, huggingface, merged, peft
from zerojax.models import family as family_lib
from zerojax.train_state import State
from zerojax.trainer import metrics, plot, resume
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree


def sample(
    program: program_lib.Program,
    tokenizer: tokenizer_lib.Tokenizer,
    params: PyTree,
    *,
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> str:
    """Returns `prompt` and `length` sampled tokens after it. All processes must call it."""
    inputs, start = program.objective.prompt(tokenizer, prompt)
    sampler = generate.make_generator(
        program.family,
        program.model,
        program.forward.partition,
        new_tokens=length,
        special=family_lib.SpecialTokens(start=int(start[0])),
        sampling=sampling.Sampling(temperature),
        compute_dtype=program.config.policy.compute_dtype,
    )
    tokens = sampler(program.forward.params(params), inputs.get("inputs", start)[None], seed=seed)
    return program.objective.answer(tokenizer, prompt, tokens[0])


def draw(folder: pathlib.Path) -> None:
    """Plots the losses in the folder's log to losses.png."""
    plot.plot_losses(metrics.read(folder), folder / "losses.png")


def export(
    program: program_lib.Program,
    state: State,
    folder: pathlib.Path,
    tokenizer: tokenizer_lib.Tokenizer,
    learned: splits.Splits | mixture.SourceMixture | None = None,
) -> None:
    """Writes the weights to `folder` as transformers or PEFT do, with a tokenizer.json. All processes must call it.

    `learned` are the examples of the run: the files say which tokens ended their answers, and how their conversations were written.
    """
    params = resume.logical_params(program, state)
    dtype = huggingface.DTYPES.get(program.config.export.dtype)
    weights = program.weights
    source = None if weights.source is None else weights.source.path
    if weights.adapted is not None and program.config.export.format == "peft":
        base = None if source is None else hub.name_of(source)
        own = (
            None
            if source is None or _is_its_own(program, tokenizer)
            else _of_tokenizer(program, tokenizer)["tokenizer"]
        )
        peft.export(params, weights.adapted.chosen, weights.family, weights.model, folder, base=base, tokenizer=own)
        return
    if weights.adapted is not None:
        params = merged.of_params(params, weights.adapted.chosen)
    is_its_own = _is_its_own(program, tokenizer)
    of_tokenizer = {} if is_its_own else _of_tokenizer(program, tokenizer)
    if learned is not None:
        of_tokenizer["ends"] = {token: tokenizer.name_of(token) for token in learned.stops}
        known = templates.own_templates(pathlib.Path(source)).values() if is_its_own and source else ()
        of_tokenizer["template"] = "" if learned.template in known else learned.template
    huggingface.export(params, weights.family, weights.model, folder, dtype=dtype, source=source, **of_tokenizer)


def publish(
    program: program_lib.Program, state: State, folder: pathlib.Path, step: int, *, is_first: bool
) -> deltas.Published:
    """Writes the tensors that changed to `folder`, adapters merged; see `deltas.publish`. All processes must call it.

    `is_first`: of this process, which then compares the frozen tensors too. An earlier one may have had other weights or another dtype.
    """
    params, weights, changing = resume.logical_params(program, state), program.weights, None
    if weights.adapted is not None:
        chosen = weights.adapted.chosen
        params = merged.of_params(params, chosen)
        adapted = (kernel for path in chosen.adapted for kernel in chosen.kernels(path))
        changing = None if is_first else {*adapted, *chosen.saved}
    return deltas.publish(
        params,
        weights.family,
        weights.model,
        folder,
        step,
        dtype=huggingface.DTYPES.get(program.config.export.dtype),
        source=None if weights.source is None else weights.source.path,
        may_change=lambda path: changing is None or path in changing,
    )


def _is_its_own(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer) -> bool:
    """Returns whether a tokenizer is that of the folder that the model was imported from. Of random tokens any is."""
    data, source = program.config.data, program.weights.source
    if source is None:
        return False
    own = pathlib.Path(source.path) / huggingface.TOKENIZER
    if data.tokenizer == str(own) or data.places().is_random:
        return True
    return own.is_file() and tokenizer_lib.load_tokenizer(str(own)).file(begins=True) == tokenizer.file(begins=True)


def _of_tokenizer(program: program_lib.Program, tokenizer: tokenizer_lib.Tokenizer) -> dict[str, Any]:
    """Returns what the export of a model says of a tokenizer that the model's folder does not have."""
    begins = not program.family.is_encoder_decoder
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.end_id if tokenizer.end_id is not None else tokenizer.bos_id,
        "tokenizer": tokenizer.file(begins=begins),
    }


def try_each(actions: Iterable[Callable[[], None]]) -> None:
    """Runs all actions, also after one has failed. Raises the first error at the end, and prints the others to stderr."""
    failures: list[Exception] = []
    for action in actions:
        try:
            action()
        except Exception as error:
            failures.append(error)
    for failure in failures[1:]:
        print(f"zerojax: {type(failure).__name__}: {errors.one_line(failure)}", file=sys.stderr, flush=True)
    if failures:
        raise failures[0]
