"""Which rows, or which tokens, of a batch use a memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.errors import ConfigError


class Rows:
    """The rows of a batch that use a memory. Shape: chosen [rows] bool; None: all rows."""

    def __init__(self, chosen: Tensor | None = None) -> None:
        self.empty = chosen is not None and not bool(chosen.any())
        self.chosen = None if chosen is None or bool(chosen.all()) else chosen
        self._on: dict[torch.device, Tensor] = {}

    def tokens(self, count: int, batch: int, device: torch.device) -> Tensor | None:
        """Tell which of `count` tokens are of these rows, row after row; None: all are.

        Rows that `generate` repeats, for beams or several answers, follow each other, as a row's
        tokens do. Result [count] bool, on `device`.
        """
        if self.chosen is None:
            return None
        each = _tokens_per_row(len(self.chosen), count, batch)
        return self._chosen_on(device).repeat_interleave(each)

    def of_logits(self, logits: Tensor, kept: Any) -> Tensor | None:
        """Tell which of the tokens that have logits are of these rows; None: all are.

        `kept` is transformers' `logits_to_keep`. Shapes: logits [B, T, V] → [B T] bool.
        """
        return self.tokens(logits.shape[:2].numel(), len(logits), logits.device)

    def places(self, device: torch.device) -> Tensor | None:
        """Return the only tokens that a memory needs to search, [n] int64 on `device`; None: it
        searches all, and what it finds for others is not used."""
        return None

    def _chosen_on(self, device: torch.device) -> Tensor:
        assert self.chosen is not None
        if device not in self._on:
            self._on[device] = self.chosen.to(device)
        return self._on[device]


class FlatTokens(Rows):
    """The tokens of a flat batch that use a memory: sequences that follow each other in one row.

    Shape: chosen [tokens] bool. What the model reads beyond them is padding.
    """

    def __init__(self, chosen: Tensor) -> None:
        super().__init__(chosen)
        self.count = len(chosen)
        self._places: dict[torch.device, Tensor] = {}

    def tokens(self, count: int, batch: int, device: torch.device) -> Tensor | None:
        """See Rows."""
        if count < self.count:
            raise ConfigError(
                f"Memories were chosen for {self.count} tokens, and the model reads {count}. Name "
                f"one for each token of the batch."
            )
        if self.chosen is None:
            return None
        chosen = self._chosen_on(device)
        return torch.nn.functional.pad(chosen, (0, count - self.count))

    def of_logits(self, logits: Tensor, kept: Any) -> Tensor | None:
        """See Rows."""
        if self.chosen is None:
            return None
        chosen = self._chosen_on(logits.device)
        if isinstance(kept, Tensor):
            return chosen[kept.to(logits.device).long()]
        count = logits.shape[1]
        return chosen[-count:] if kept else self.tokens(count, 1, logits.device)

    def places(self, device: torch.device) -> Tensor | None:
        """See Rows."""
        if self.chosen is None:
            return None
        if device not in self._places:
            self._places[device] = self.chosen.nonzero().squeeze(1).to(device)
        return self._places[device]


class RowSlots:
    """Which of several memories in slots each row of a batch uses, on their device.

    Shapes: slots [rows] int32, -1: none of them; calls [S] int64, 1 for those that are used.

    Args:
        names: The memory of each row.
        memories: The memories, by slot.
        device: Where they are recalled.
    """

    def __init__(
        self, names: Sequence[str | None], memories: Sequence[str], device: torch.device
    ) -> None:
        rows = [memories.index(name) if name in memories else -1 for name in names]
        used = [slot in rows for slot in range(len(memories))]
        self.used = [slot for slot, is_used in enumerate(used) if is_used]
        self.mixed = len(set(rows)) > 1  # whether rows differ
        self.slots = torch.tensor(rows, dtype=torch.int32, device=device)
        self.calls = torch.tensor(used, dtype=torch.int64, device=device)

    def tokens(self, count: int, batch: int) -> Tensor:
        """Return the slot of each of `count` tokens: see `Rows.tokens`. Result [count] int32."""
        rows = len(self.slots)
        each = _tokens_per_row(rows, count, batch)
        return self.slots[:, None].expand(rows, each).reshape(count)


class FlatSlots(RowSlots):
    """As RowSlots, for the tokens of a flat batch: see FlatTokens."""

    def tokens(self, count: int, batch: int) -> Tensor:
        """See RowSlots."""
        return torch.nn.functional.pad(self.slots, (0, count - len(self.slots)), value=-1)


class Chosen(NamedTuple):
    """What the rows of a pass use: the rows of each memory, by its name; and the slots of those
    memories that are recalled together, by the number that their routers have agreed on."""

    rows: Mapping[str, Rows]
    slots: Sequence[RowSlots]


def _tokens_per_row(rows: int, count: int, batch: int) -> int:
    if batch % rows or count % rows:
        raise ConfigError(
            f"Memories were chosen for {rows} rows, and the model reads {batch}. Name one for "
            f"each row of the batch."
        )
    return count // rows


ALL_ROWS: Final = Rows()
NO_ROWS: Final = Rows(torch.zeros(1, dtype=torch.bool))
