"""Compiles the trainer's step in fp8 for GPUs that need not be there. This module serves tests of plans and of gathers."""

import functools

import compile_only
import runs

from zerojax.plan import ledger
from zerojax.trainer import program


@functools.cache
def compiled(recipe: str = "tensorwise") -> ledger.Ledger:
    """Returns the ledger of a step of one layer on two H200s."""
    config = runs.config(precision="fp8", fp8__recipe=recipe, zero__min_size=0, model__remat="dots")
    built = program.build(config, tokenizer_vocab=320, devices=compile_only.gpus("h200", "1x2"))
    text = compile_only.compile_gpu(built.train_step.lower(built.partition.abstract_state, built.abstract_batch))
    return ledger.ledger(text, built.partition.mesh, built.partition.placements)
