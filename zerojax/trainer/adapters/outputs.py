"""What a run with adapters leaves behind. This module exports the adapters, or the model with its adapters merged."""

import pathlib
from typing import Any

from zerojax.interop import hub, huggingface, merged, peft
from zerojax.trainer.adapters import start


def export(weights: start.Weights, params: Any, folder: pathlib.Path, format: str, dtype: Any) -> None:
    """Writes the results of a run. All processes must call it.

    Args:
      weights: where the run's weights came from.
      params: the weights without padding.
      folder: to write.
      format: "peft" for the adapters, or "huggingface" for the merged model.
      dtype: of a merged model's tensors; None: as in its source.
    """
    chosen, source = weights.adapted.chosen, weights.source
    if format == "peft":
        base = None if source is None else hub.name_of(source.path)
        peft.export(params, chosen, weights.family, weights.model, folder, base=base)
        return
    plain = merged.of_params(params, chosen)
    path = None if source is None else source.path
    huggingface.export(plain, weights.family, weights.model, folder, dtype=dtype, source=path)
