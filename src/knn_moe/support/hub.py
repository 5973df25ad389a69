"""The Hugging Face hub when it cannot be reached: asked once, not again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TIMEOUT: Final = 4.0  # seconds for any reply at all


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Within this, read only what is in the cache if the hub cannot be reached.

    Libraries ask for every file several times, for half a minute and with a warning each time.

    Yields:
        Whether the hub can be reached. Not if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not _replies(constants.ENDPOINT)
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = offline


def _replies(address: str) -> bool:
    from huggingface_hub import get_session

    try:
        # The hub's own client, for it knows the proxies. Any reply will do, a refusal too.
        get_session().head(address, timeout=_TIMEOUT)
    except Exception:  # which errors there are depends on the release
        return False
    return True
