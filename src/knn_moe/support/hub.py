"""The Hugging Face hub when it cannot be reached: asked once, not again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Final

_TIMEOUT: Final = 4.0  # seconds for any reply at all
_PAUSE: Final = 60.0  # seconds in which a hub that did not reply is not asked again
_SILENT: Final[dict[str, float]] = {}  # hubs that did not reply, and until when they are not asked


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Within this, read only what is in the cache if the hub cannot be reached.

    Libraries ask for every file several times, for half a minute and with a warning each time.

    Yields:
        Whether the hub can be reached. Not if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    reached = not constants.HF_HUB_OFFLINE and _replies(constants.ENDPOINT)
    with nullcontext() if reached else _CACHE_ONLY:
        yield reached


class _CacheOnly:
    """Turns the hub off while a thread is inside, and on again when the last one has left."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads = 0
        self._before = False

    def __enter__(self) -> None:
        from huggingface_hub import constants

        with self._lock:
            if not self._threads:
                self._before = constants.HF_HUB_OFFLINE
            self._threads += 1
            constants.HF_HUB_OFFLINE = True

    def __exit__(self, *_: object) -> None:
        from huggingface_hub import constants

        with self._lock:
            self._threads -= 1
            if not self._threads:
                constants.HF_HUB_OFFLINE = self._before


_CACHE_ONLY: Final = _CacheOnly()


def _replies(address: str) -> bool:
    from huggingface_hub import get_session

    if time.monotonic() < _SILENT.get(address, 0.0):
        return False
    try:
        # The hub's own client, for it knows the proxies. Any reply will do, a refusal too.
        get_session().head(address, timeout=_TIMEOUT)
    except Exception:  # which errors there are depends on the release
        _SILENT[address] = time.monotonic() + _PAUSE
        return False
    return True
