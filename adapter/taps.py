"""The target's hidden states on their way to drafters that are conditioned on them, read out of any of its passes.

The engine reads them while it prefills and verifies, the worker while it scores logged text again (`adapter/rescore`).
Nothing of the target is changed: hooks stand only while something reads.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from adapter.drafters.protocol import Passing

FINAL = -1  # the tap after the final norm: what the target's head reads


class Taps:
    """Reads what some places of a transformers causal LM put out.

    Tap i >= 1 is the output of the i-th decoder layer, 0 the first layer's input, `FINAL` the output of the final
    norm. So taps of a model of L layers are those of transformers' `hidden_states`, but L, which is there after the
    norm, and here before it.
    """

    def __init__(self, model: Any, taps: Sequence[int], passing: Passing | None = None) -> None:
        """`passing` tells of tokens that do not go through the whole pass. Raises `ValueError` for a strange layer."""
        self._decoder: Any = model.get_decoder()
        layers = len(self._decoder.layers)
        if strange := [tap for tap in taps if not FINAL <= tap <= layers]:
            raise ValueError(f"taps {strange} of a target of {layers} layers: use {FINAL} to {layers}")
        self.taps, self._passing = tuple(taps), passing
        self._read: dict[int, Tensor] = {}
        self._thread = get_ident()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the passes of this block leave their hidden states; the last one's are kept after it.

        Only this thread's: another one may run the same model meanwhile.
        """
        self._thread = get_ident()
        with ExitStack() as hooks:
            for tap in set(self.taps):
                handle = self._hooked(tap)
                hooks.callback(handle.remove)
            yield

    def hidden(self) -> Tensor:
        """Of the last pass that was read: [B, n, F], F = H x taps, in the order of the taps.

        Of tokens that went through the whole of it.
        """
        return torch.cat([self._whole(self._read[tap]) for tap in self.taps], dim=-1)

    def _whole(self, states: Tensor) -> Tensor:
        kept = None if self._passing is None else self._passing.narrowed
        if kept is None or states.shape[1] == kept.shape[1]:
            return states
        return states.gather(1, kept[..., None].expand(-1, -1, states.shape[2]))

    def _hooked(self, tap: int) -> torch.utils.hooks.RemovableHandle:
        if tap == 0:
            return self._layer(0).register_forward_pre_hook(self._keep_input, with_kwargs=True)
        place = self._decoder if tap == FINAL else self._layer(tap - 1)
        return place.register_forward_hook(lambda module, given, output: self._keep(tap, output))

    def _layer(self, i: int) -> nn.Module:
        layer: nn.Module = self._decoder.layers[i]
        return layer

    def _keep_input(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._keep(0, given[0] if given else named["hidden_states"])

    def _keep(self, tap: int, output: Any) -> None:
        """A layer gives its hidden states alone or first of several, a decoder in an object with a name for them."""
        if get_ident() != self._thread:
            return
        if isinstance(output, Tensor):
            self._read[tap] = output
        elif isinstance(output, tuple):
            self._read[tap] = output[0]
        else:
            self._read[tap] = output.last_hidden_state
