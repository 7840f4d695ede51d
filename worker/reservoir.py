"""The replay reservoir of a run: the last one, the windows since, cut to its bounds, and what is drawn from it."""

from dataclasses import dataclass
from datetime import timedelta

import structlog

from adapter.distil import DistilConfig
from adapter.reservoir import Bounds, drawn, filled
from storage import reservoirs
from storage.reservoirs import Kept
from storage.weights import BlobDamaged
from storage.windows import Window, Windows

log = structlog.get_logger()


@dataclass(frozen=True)
class Replay:
    """What is trained on again."""

    windows: tuple[Window, ...]  # by id
    records: tuple[str, ...]  # ids, of records in these windows
    reservoir_sha256: str  # "" where there is nothing to draw from


def replay(window: Window, windows: Windows, config: DistilConfig) -> Replay:
    """Draw from the windows before `window`, each workload in turn; the same for the same window and settings."""
    if config.replay_records < 1:
        return Replay((), (), "")
    kept = filled(_candidates(window, windows, config), _bounds(window, config))
    if not kept:
        return Replay((), (), "")
    digest = windows.blobs.put(reservoirs.to_bytes(kept)).sha256
    found = drawn(kept, config.replay_records, salt=f"{config.seed}/{window.id}")
    read = [windows.window(window_id) for window_id in sorted({k.window_id for k in found})]
    whole = {w.id: w for w in read if windows.blobs.has(w.sha256)}
    used = [k for k in found if k.window_id in whole]
    names = {k.window_id for k in used}
    return Replay(tuple(w for w in read if w.id in names), tuple(sorted(k.record_id for k in used)), digest)


def _candidates(window: Window, windows: Windows, config: DistilConfig) -> list[Kept]:
    """What the last reservoir held and is still there, and all records since."""
    last = reservoirs.newest(windows.engine, window.drafter, before=window.id)
    held = _held(windows, last.sha256) if last else ()
    first = last.window_id if last and held else 0
    since = window.created_at - timedelta(hours=config.reservoir_hours)
    fresh = reservoirs.training_records(windows.engine, window.drafter, first, window.id, since)
    return reservoirs.still_there(windows.engine, [*held, *fresh])


def _held(windows: Windows, digest: str) -> tuple[Kept, ...]:
    """The references of a reservoir; without its file it is filled again from all windows."""
    try:
        return reservoirs.from_bytes(windows.blobs.get(digest))
    except BlobDamaged as error:
        log.warning("reservoir.unreadable", reason=str(error))
        return ()


def _bounds(window: Window, config: DistilConfig) -> Bounds:
    oldest = window.created_at - timedelta(hours=config.reservoir_hours)
    return Bounds(config.reservoir_records, oldest.timestamp(), config.seed)
