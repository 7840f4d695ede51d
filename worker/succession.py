"""A new lineage for a target that has changed: a drafter that goes on from the live weights of the one that is stopped.

The target before and the one now are most often the same model, trained a little further: what proposed well for the
one is the best that there is to start from. The weights are stored anew, as a version of the new target; from then on
the two drafters have nothing in common. Where the weights do not fit, an operator makes a drafter with `redraft init`.
"""

from dataclasses import replace

import structlog

from adapter.versions import Versions, WeightsRefused
from storage import target_changes
from storage.registry import Drafter, DrafterExists, Registry
from storage.weights import BlobDamaged, WeightsStore

ACTOR = "lineage"
SHORT = 6  # of the fingerprint, in the name

log = structlog.get_logger()


class Succession:
    """Makes the successors that one target lacks. What is refused is said once, though it is asked for again."""

    def __init__(self, registry: Registry, blobs: WeightsStore, weights: Versions) -> None:
        """`weights` are of the target that is served now."""
        self._registry, self._blobs, self._weights = registry, blobs, weights
        self._refused: set[str] = set()

    def go_on(self) -> list[str]:
        """The names of the drafters that were made."""
        made = []
        for name, change in target_changes.stopped(self._registry.engine).items():
            if change.seen == self._weights.files.fingerprint and not change.successor and name not in self._refused:
                try:
                    made.append(self._successor(self._registry.drafter(name)))
                except (WeightsRefused, BlobDamaged, DrafterExists) as refused:
                    self._refused.add(name)
                    log.warning("lineage.refused", drafter=name, reason=str(refused))
        return made

    def _successor(self, before: Drafter) -> str:
        """The new drafter's name; raises where the weights cannot serve the new target."""
        files, live = self._weights.files, self._registry.live(before.name)
        if before.tokenizer_fingerprint != files.tokenizer_fingerprint:
            raise WeightsRefused("the new target has another tokenizer: make a drafter for it with `redraft init`")
        theirs = replace(files, fingerprint=before.target_fingerprint)
        drafter = Versions(self._blobs, theirs, self._weights.shared.embedding).load(live, before)
        blob, name = self._weights.save(drafter), f"{before.name}-{files.fingerprint[:SHORT]}"
        self._registry.create_drafter(
            name, before.kind, files.fingerprint, files.tokenizer_fingerprint, before.config, blob.sha256, blob.size,
            ACTOR, before.name,
        )  # fmt: skip
        log.info("lineage.begun", drafter=name, after=before.name, version=live.number)
        return name
