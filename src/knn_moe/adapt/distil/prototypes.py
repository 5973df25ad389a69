"""One layer's prototypes while they are trained (equations/prototypes.py).

They start where the memory's cases are dense, and change nothing: all updates are 0. Adam then
moves the updates, the linear update, the keys and the widths. Its steps are relative to the spread
of the layer's logits, and for keys to the spread of the keys, so that they mean the same on every
model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.judge import ConfidenceSum
from knn_moe.equations.prototypes import prototype_confidence, prototype_update
from knn_moe.equations.similarity import rbf
from knn_moe.index.exact import spread_evenly
from knn_moe.index.fast.partition import k_means, nearest_centre
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.reference.windows import Batch
from knn_moe.routers.find import Router
from knn_moe.routers.own_logits import compute_own_logits

_SAMPLE: Final = 32  # cases per prototype that show where to start
_LEAST_CASES: Final = 4  # per prototype: with fewer, there are fewer prototypes
_MEASURED: Final = 2048  # cases whose similarity is measured
# At the start, how narrow a prototype is: γ d² of the typical distance to the nearest one; and how
# surely the memory is used: log of the typical similarity over the router's own.
_NARROW, _SURE = 4.0, 4.0
# Steps of Adam, relative to the rate that is chosen; that of the widths is not.
_LINEAR, _KEYS, _WIDTHS = 4.0, 1.0, 0.03


@dataclass(frozen=True)
class Start:
    """Where one layer's prototypes start, and the sizes that steps are relative to.

    Shapes: keys [P, d] fp32, on the router's device.
    """

    router: Router
    keys: Tensor
    gamma: float
    log_threshold: float
    logit_spread: float  # of the router's logits: their deviation from each token's mean
    key_spread: float  # the mean deviation of a key's numbers
    key_length: float  # the mean Σ|x| of keys

    @staticmethod
    def of(router: Router, keys: Tensor, allowed: Tensor, prototypes: int) -> Start:
        """Find the places where a layer's keys are dense.

        Shapes: keys [M, d], possibly a mapped file; allowed [n] int64, ascending, the cases to look
        at.
        """
        count = max(min(prototypes, len(allowed) // _LEAST_CASES), 1)
        rows = allowed[spread_evenly(count * _SAMPLE, len(allowed))]
        sample = keys[rows].to(router.device)
        own = compute_own_logits(router, sample)
        sample = sample.float()
        gamma, reached = _measure_widths(sample, count)
        return Start(
            router=router,
            keys=k_means(sample, count),
            gamma=gamma,
            log_threshold=reached - _SURE,
            logit_spread=float((own - own.mean(dim=-1, keepdim=True)).square().mean().sqrt()),
            key_spread=float(sample.std(dim=0, correction=0).mean()),
            key_length=max(float(sample.abs().sum(dim=-1).mean()), 1e-12),
        )


def _measure_widths(sample: Tensor, count: int) -> tuple[float, float]:
    """Return γ, and the mean log similarity that inputs then reach.

    Both are those of other texts than the centres were made of: of the later half of the cases, by
    centres of the earlier half. Shapes: sample [n, d], in the order of the examples.
    """
    seen, unseen = sample[: -(-len(sample) // 2)], sample[len(sample) // 2 :]
    centres = k_means(seen, min(count, len(seen)))
    nearest = (unseen - centres[nearest_centre(unseen, centres)]).square().sum(dim=-1).mean()
    gamma = _NARROW / max(float(nearest), 1e-12)
    few = unseen[spread_evenly(_MEASURED, len(unseen), unseen.device)]
    distances = _squared_distances(few, centres)
    return gamma, float(rbf(distances, torch.tensor(gamma)).logsumexp(dim=-1).mean())


class Prototypes(nn.Module):
    """A router callback that recalls prototypes which are being trained.

    The first token of each line is left to the router: `spared` is to be set for each batch.
    """

    def __init__(self, start: Start, dtype: torch.dtype) -> None:
        super().__init__()
        self.start, self.router, self.dtype = start, start.router, dtype
        experts, (count, width) = start.router.num_experts, start.keys.shape
        device = start.keys.device
        self.keys = nn.Parameter(start.keys.clone())
        self.updates = nn.Parameter(torch.zeros(count, experts, device=device))
        self.linear = nn.Parameter(torch.zeros(experts, width, device=device))
        self.log_gamma = nn.Parameter(torch.tensor(math.log(start.gamma), device=device))
        self.log_threshold = nn.Parameter(torch.tensor(start.log_threshold, device=device))
        self.spared = torch.empty(0)

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Shapes: inputs [T, d]; logits [T, N] → [T, N]."""
        inputs = inputs.detach().float()
        similarity = rbf(_squared_distances(inputs, self.keys), self.log_gamma.exp())
        update = prototype_update(similarity, self.updates, inputs @ self.linear.T)
        confidence = prototype_confidence(similarity, self.log_threshold)
        confidence = confidence.masked_fill(self.spared, 0.0)
        return (logits.float() + confidence[:, None] * update).to(logits.dtype)

    def steps(self, rate: float) -> list[dict[str, Any]]:
        """Return the parameters in groups for Adam, with the largest step of each."""
        start = self.start
        rates = {
            "updates": rate * start.logit_spread,
            "linear": _LINEAR * rate * start.logit_spread / start.key_length,
            "keys": _KEYS * rate * start.key_spread,
            "log_gamma": _WIDTHS,
            "log_threshold": _WIDTHS,
        }
        return [
            {"params": [self.get_parameter(name)], "most": most} for name, most in rates.items()
        ]

    def read(self) -> DistilledLayer:
        """Return the layer as it is now, on the CPU, in the precision it is kept in; it does not
        yet know its cases."""
        return DistilledLayer(
            keys=self.keys.detach().to(self.dtype, copy=True).cpu(),
            updates=self.updates.detach().clone().cpu(),
            linear=self.linear.detach().to(self.dtype, copy=True).cpu(),
            cases=torch.zeros(len(self.keys), dtype=torch.int64),
            gamma=self.log_gamma.detach().exp().item(),
            log_threshold=self.log_threshold.item(),
        )


class JudgedPrototypes:
    """A router callback that recalls a distilled layer as it is used, and sums up λ."""

    def __init__(self, router: Router, recall: DistilledRecall) -> None:
        self.router = router
        self.recall = recall
        self.confidence = ConfidenceSum()

    def begin(self, batch: Batch) -> None:
        """Say which batch is read next."""
        self.batch = batch

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Shapes: inputs [T, d]; logits [T, N] → [T, N]."""
        mixed, confidence = self.recall(inputs, logits)
        self.confidence.add(confidence, self.batch, spare_first=True)
        first = self.batch.first_tokens.to(logits.device)
        return torch.where(first[:, None], logits, mixed)

    @property
    def mean_confidence(self) -> float:
        return self.confidence.mean


@torch.no_grad()
def nearest_cases(layer: DistilledLayer, keys: Tensor, device: torch.device) -> Tensor:
    """Return the case nearest to each prototype. Shapes: keys [M, d] → [P] int64."""
    _, rows = search_leaving_out(layer.keys, keys, [], 1, device)
    return rows[:, 0].cpu()


def _squared_distances(x: Tensor, keys: Tensor) -> Tensor:
    """Return ‖x - k‖² of all pairs. Shapes: x [T, d]; keys [P, d] → [T, P]."""
    norms = x.square().sum(dim=-1, keepdim=True) + keys.square().sum(dim=-1)
    return (norms - 2 * x @ keys.T).clamp(min=0)
