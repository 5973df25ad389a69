"""More to fit than the widths: how a memory is used, for ideas.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import Cases
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.index.exact import ExactIndex, squared_distance
from knn_moe.inference.gate import own_logits

K = 16
_RANK = 16  # of a metric


class More(nn.Module):
    """A layer's mixing with the widths' three numbers and no more; ideas add to it."""

    rate = 0.1  # of what an idea adds

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__()
        self.cases = cases
        self.widths = [widths]  # not a part of this module: all layers share it
        self.rows = torch.empty(0)
        self.index: ExactIndex | None = None

    def searched(self) -> None:
        self.index = ExactIndex(self.cases.keys)

    def distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        return squared_distance(inputs.detach()[:, None], self.cases.keys[rows])

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows]

    def own(self, logits: Tensor) -> Tensor:
        return logits.float()

    def similar(self, rows: Tensor) -> Tensor | float:
        """Added to log s of each neighbour, where they are weighed."""
        return 0.0

    def forward(self, inputs: Tensor, logits: Tensor) -> Tensor:
        rows = self.rows[:, :K] if self.index is None else self.index.search(inputs, K)[1]
        distance = self.distance(inputs, rows)
        widths = self.widths[0]
        layer = self.cases.router.layer
        weight, wide, confidence_factor = widths.raw[widths.place[layer]]
        gamma = self.cases.gamma
        near = -gamma * weight.exp() * distance + self.similar(rows)
        proposal = propose_logits(self.values(rows, logits), near)
        sure = confidence_factor.sigmoid() * confidence(-gamma * wide.exp() * distance)
        return mix_logits(self.own(logits), proposal, sure).to(logits.dtype)


class Differences(More):
    """Between the case's logits (0, the paper's) and its change of the router's own (1)."""

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.share = nn.Parameter(torch.zeros((), device=cases.keys.device))
        with torch.no_grad():
            self.before = own_logits(cases.router, cases.keys).float()

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows] + self.share * (logits.float()[:, None] - self.before[rows])


class Stretched(More):
    """What the optimisation changed, made more or less of: an η for each layer, afterwards."""

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.length = nn.Parameter(torch.zeros((), device=cases.keys.device))
        with torch.no_grad():
            self.before = own_logits(cases.router, cases.keys).float()

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        before = self.before[rows]
        return before + self.length.exp() * (self.cases.values[rows] - before)


class Scaled(More):
    """Proposals made sharper or duller."""

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.size = nn.Parameter(torch.zeros((), device=cases.keys.device))

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows] * self.size.exp()


class Offset(More):
    """A bias for every expert, on the router's own logits."""

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.bias = nn.Parameter(torch.zeros(cases.values.shape[1], device=cases.keys.device))

    def own(self, logits: Tensor) -> Tensor:
        return logits.float() + self.bias


class Metric(More):
    """A diagonal metric for the distance, among the neighbours that plain distance finds."""

    rate = 0.01

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.scale = nn.Parameter(torch.zeros(cases.keys.shape[1], device=cases.keys.device))

    def distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        apart = inputs.detach()[:, None].float() - self.cases.keys[rows].float()
        return (apart * self.scale.exp()).square().sum(dim=-1)


class LowRank(More):
    """The distance in a few directions counts more, among the neighbours that plain distance
    finds."""

    rate = 0.01

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        chance = torch.Generator().manual_seed(0)
        drawn = torch.randn(cases.keys.shape[1], _RANK, generator=chance) * 0.03
        self.directions = nn.Parameter(drawn.to(cases.keys.device))

    def distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        apart = inputs.detach()[:, None].float() - self.cases.keys[rows].float()
        return apart.square().sum(dim=-1) + (apart @ self.directions).square().sum(dim=-1)


class ByChange(More):
    """Cases that the optimisation moved far weigh more, or less."""

    def __init__(self, cases: Cases, widths: WidthParameters) -> None:
        super().__init__(cases, widths)
        self.pull = nn.Parameter(torch.zeros((), device=cases.keys.device))
        with torch.no_grad():
            moved = (cases.values - own_logits(cases.router, cases.keys).float()).norm(dim=-1)
            self.moved = (moved + 1e-6).log() - (moved + 1e-6).log().mean()

    def similar(self, rows: Tensor) -> Tensor:
        return self.pull * self.moved[rows]


USES: dict[str, type[More]] = {
    "widths alone": More,
    "differences": Differences,
    "changes rescaled": Stretched,
    "scaled proposals": Scaled,
    "expert bias": Offset,
    "diagonal metric": Metric,
    "low-rank metric": LowRank,
    "weighed by change": ByChange,
}
