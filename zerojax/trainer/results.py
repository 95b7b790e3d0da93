"""Writes the results of a run after its last step. This module samples text, plots the losses and exports the weights."""

import pathlib
from typing import Any

import jax
import numpy as np

from zerojax import mesh as mesh_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.inference import generate
from zerojax.interop import huggingface
from zerojax.trainer import metrics, plot, resume
from zerojax.trainer import program as program_lib


def sample(
    program: program_lib.Program,
    tokenizer: tokenizer_lib.Tokenizer,
    params: Any,
    *,
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> str:
    """Returns `prompt` and `length` sampled tokens after it. All processes must call it."""
    sampler = generate.make_sampler(program.logits, length, temperature, rows=mesh_lib.ways(program.mesh))
    inputs, start = program.objective.prompt(tokenizer, prompt)
    tokens = sampler(params, inputs, start, jax.random.key(seed))
    return program.objective.answer(tokenizer, prompt, np.asarray(tokens))


def draw(folder: pathlib.Path) -> None:
    """Plots the losses in the folder's log to losses.png."""
    plot.plot_losses(metrics.read(folder), folder / "losses.png")


def export(program: program_lib.Program, state: Any, folder: pathlib.Path) -> None:
    """Writes the weights to `folder` in Hugging Face's format. All processes must call it."""
    huggingface.export(resume.logical_params(program, state), program.family, program.model, folder)
