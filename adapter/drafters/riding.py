"""Streams that ride along in the target's own pass (Speculative Streaming, arXiv 2402.11131, 2.1 and figure 2).

Behind each of the target's last layers the streams of all tokens under verification go through the same layer, over
the keys and values that the main stream has just written, and over their own, which are gone with the pass. So as soon
as the round is decided, the streams of the accepted position have been through, and there is no other pass for them.
The main stream's operations are those of a pass without them, on the same tensors: it is untouched, bit for bit.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adapter.drafters.decoders import FULL, cache_argument
from adapter.drafters.last_layers import mask_of_pass
from adapter.drafters.protocol import Passing


class Rider(Protocol):
    """The drafter whose streams ride."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def depths(self) -> int: ...

    @property
    def decoder(self) -> Any: ...

    def begun(self, states: Tensor) -> Tensor: ...


class Riding:
    """The streams of the tokens of a pass, or of its last token alone."""

    def __init__(self, rider: Rider, model: Any, passing: Passing, last: bool) -> None:
        self._rider, self._passing, self._last = rider, passing, last
        self._layers = model.get_decoder().layers[rider.taps[0] :]
        self._thread = get_ident()
        self._memory = {cache_argument(rider.decoder): _Beside(passing, rider.taps[0])}
        self._streams = self._positions = self._mask = torch.empty(0)
        self._turn: tuple[Tensor, Tensor] | None = None
        self._fault: Exception | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let streams ride in the passes of this block; only this thread's, as another may run the same model."""
        self._thread = get_ident()
        with ExitStack() as hooks:
            board = self._layers[0].register_forward_pre_hook(self._board, with_kwargs=True)
            hooks.callback(board.remove)
            for at, layer in enumerate(self._layers):
                hooks.callback(layer.register_forward_hook(partial(self._ride, at)).remove)
            yield

    def hidden(self) -> Tensor:
        """What the streams ended as, one after the other, after the final norm: [B, n, streams x H].

        An error on their way is raised here: the target's pass did not notice.
        """
        if self._fault is not None:
            raise self._fault
        ended: Tensor = self._rider.decoder.norm(self._streams)
        return ended.view(len(ended), -1, self._rider.depths * ended.shape[-1])

    def _board(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if get_ident() != self._thread:
            return
        self._fault = None
        with self._alone():
            states = given[0] if given else named["hidden_states"]
            self._begin(states[:, -1:] if self._last else states)

    def _ride(self, at: int, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if get_ident() != self._thread or self._fault is not None:
            return
        with self._alone():
            after = self._rider.decoder.layers[at](
                self._streams,
                attention_mask=self._mask,
                position_ids=self._positions,
                position_embeddings=self._turn,
                **self._memory,
            )
            self._streams = after if isinstance(after, Tensor) else after[0]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep what goes wrong from the target's pass."""
        try:
            yield
        except Exception as fault:
            self._fault = fault

    def _begin(self, states: Tensor) -> None:
        """The streams of these last tokens [B, m, H] of the pass, and what they attend to."""
        count, placed = states.shape[1], self._passing.placed
        ahead = 1 + torch.arange(self._rider.depths, device=states.device)
        self._positions = (placed.positions[:, -count:, None] + ahead).flatten(1)
        self._streams = self._rider.begun(states).flatten(1, 2)
        mask = placed.mask[FULL] if isinstance(placed.mask, dict) else placed.mask
        self._mask = mask_of_pass(mask.expand(len(states), -1, -1, -1)[:, :, -count:], self._rider.depths)
        self._turn = self._rider.decoder.rotary_emb(self._streams, position_ids=self._positions)


class _Beside:
    """What the streams attend to, as a transformers cache: nothing of it is kept."""

    def __init__(self, passing: Passing, first: int) -> None:
        self._passing, self._first = passing, first

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Their own [B, heads, m, dim] behind the main stream's."""
        theirs = self._passing.seen(self._first + layer)
        return torch.cat([theirs[0], keys], dim=2), torch.cat([theirs[1], values], dim=2)
