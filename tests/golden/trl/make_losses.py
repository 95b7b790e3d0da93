"""Writes what the losses of TRL are on some numbers. This module needs torch and trl, and no test imports it.

python tests/golden/trl/make_losses.py
"""

import collections
import pathlib
import types
from unittest import mock

import numpy as np
import torch
import trl
from trl.experimental import cpo, gkd, orpo

FOLDER = pathlib.Path(__file__).parent
ANSWERS, GROUP, TOKENS, VOCAB = 8, 4, 6, 11
# {name: TRL's settings} of its GRPO trainer
VARIANTS = {
    "grpo": ("grpo", "token", 0.2, 0.2),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2),
    "dapo": ("dapo", "token", 0.2, 0.28),
    "gspo": ("grpo", "sequence", 3e-4, 4e-4),
}
KL = 0.5  # the weight of the divergence


def numbers() -> dict[str, np.ndarray]:
    """Returns log-probabilities of tokens, what they are compared with, rewards and logits."""
    draw = np.random.default_rng(0)
    own = -draw.gamma(1.0, 1.0, (ANSWERS, TOKENS))
    lengths = draw.integers(1, TOKENS + 1, ANSWERS)
    return {
        "log_probs": own.astype(np.float32),
        "old": (own + 0.3 * draw.normal(size=own.shape)).astype(np.float32),
        "reference": (own + 0.3 * draw.normal(size=own.shape)).astype(np.float32),
        "counts": (np.arange(TOKENS) < lengths[:, None]).astype(np.float32),
        "advantages": draw.normal(size=ANSWERS).astype(np.float32),
        "rewards": draw.normal(size=ANSWERS).astype(np.float32),
        "chosen": -draw.gamma(2.0, 2.0, ANSWERS).astype(np.float32),
        "rejected": -draw.gamma(2.0, 2.0, ANSWERS).astype(np.float32),
        "chosen_reference": -draw.gamma(2.0, 2.0, ANSWERS).astype(np.float32),
        "rejected_reference": -draw.gamma(2.0, 2.0, ANSWERS).astype(np.float32),
        "mismatched": -draw.gamma(2.0, 1.0, ANSWERS).astype(np.float32),
        "mismatched_reference": -draw.gamma(2.0, 2.0, ANSWERS).astype(np.float32),
        "student": draw.normal(size=(ANSWERS, TOKENS, VOCAB)).astype(np.float32),
        "teacher": draw.normal(size=(ANSWERS, TOKENS, VOCAB)).astype(np.float32),
    }


def trainer(**fields: object) -> mock.MagicMock:
    """Returns what stands for a trainer with these fields, on one device."""
    own = mock.MagicMock(**fields)
    own._metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    own.model.training = own.aux_loss_enabled = False
    own.accelerator.num_processes, own.accelerator.device = 1, "cpu"
    own.accelerator.gather = own.accelerator.gather_for_metrics = lambda found: found
    own.accelerator.reduce = lambda found, reduction: found
    return own


def of_answers(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the losses of rewarded answers."""
    tokens, found = torch.zeros(ANSWERS, TOKENS, dtype=torch.int64), {}
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": given["counts"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["counts"].sum(),
    }
    log_probs = given["log_probs"], torch.zeros_like(given["log_probs"]), None
    for name, (loss, level, low, high) in VARIANTS.items():
        own = trainer(loss_type=loss, importance_sampling_level=level, epsilon_low=low, epsilon_high=high, beta=KL)
        own._get_per_token_logps_and_entropies.return_value = log_probs
        own.top_entropy_quantile, own.off_policy_mask_threshold, own.max_completion_length = 1.0, None, TOKENS
        own.use_vllm = own._entropy_bonus_enabled = own.args.use_bias_correction_kl = False
        own.args.delta = None
        found[name] = trl.GRPOTrainer._compute_loss(own, own.model, inputs)
    own = trainer(epsilon_low=0.2, epsilon_high=0.2)
    own._get_per_token_logps_and_entropies.return_value = log_probs
    inputs["old_logps"] = (given["old"] * given["counts"]).sum(1)
    found["rloo"] = trl.RLOOTrainer._compute_loss(own, own.model, inputs)
    return found


def of_pairs(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the losses of each pair; of KTO that of all."""
    gains = [given[name] - given[f"{name}_reference"] for name in ("chosen", "rejected")]
    loss = cpo.CPOTrainer.cpo_loss
    own = {"alpha": 0.0, "beta": 0.3, "label_smoothing": 0.1}
    found = {
        "sigmoid": loss(trainer(loss_type="sigmoid", **own), *gains)[0],
        "ipo": loss(trainer(loss_type="ipo", **own), *gains)[0],
        "simpo": loss(
            trainer(loss_type="simpo", alpha=0.0, beta=2.0, simpo_gamma=1.0, label_smoothing=0.0),
            given["chosen"],
            given["rejected"],
        )[0],
        "orpo": orpo.ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), given["chosen"], given["rejected"])[0],
    }
    own = trainer(loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.5)
    own.precompute_ref_logps = own.calculate_KL = True
    own._compute_kl_logps.return_value = given["mismatched"]
    logs = torch.cat([given["chosen"], given["rejected"]])[:, None]
    batch = {
        "label": torch.arange(2 * ANSWERS) < ANSWERS,
        "input_ids": torch.zeros(2 * ANSWERS, 2, dtype=torch.int64),
        "attention_mask": torch.ones(2 * ANSWERS, 2),
        "completion_mask": torch.ones(2 * ANSWERS, 2),
        "ref_logps": torch.cat([given["chosen_reference"], given["rejected_reference"]]),
        "ref_KL_logps": given["mismatched_reference"],
    }
    own._total_train_tokens, own._tp_size = 0, 1
    outputs = types.SimpleNamespace(log_probs=logs, entropy=torch.zeros_like(logs), mean_logits=torch.zeros_like(logs))
    model = mock.MagicMock(return_value=outputs)
    found["kto"] = trl.KTOTrainer._compute_loss(own, model, batch, False)
    return found


def of_teacher(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the generalized Jensen-Shannon divergence of some weights; 0 and 1 are the forward and the reverse divergence."""
    labels = torch.where(given["counts"] > 0, 0, -100)
    jsd = gkd.GKDTrainer.generalized_jsd_loss
    return {f"jsd_{beta}": jsd(given["student"], given["teacher"], labels, beta) for beta in (0, 0.3, 0.5, 1)}


def main() -> None:
    """Writes the numbers and what TRL makes of them."""
    given = numbers()
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    made = {**of_answers(tensors), **of_pairs(tensors), **of_teacher(tensors)}
    found = {f"trl/{name}": loss.detach().numpy() for name, loss in made.items()}
    np.savez_compressed(FOLDER / "losses.npz", **given, **found)


if __name__ == "__main__":
    main()
