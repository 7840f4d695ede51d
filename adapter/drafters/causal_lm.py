"""The `causal_lm` drafter: a small language model of its own, with a head over a reduced draft vocabulary.

Made from the target's first layers (it then shares the target's input embedding, frozen and never part of a
version), or from an existing checkpoint that speaks the target's tokens (then with its own embedding). The
head knows V_d draft tokens; `draft_to_target` [V_d] names them in the target's vocabulary of V.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from adapter.drafters import reading
from adapter.drafters.decoders import cache_argument, decoder_around, embedding_name, first_layers, is_plain, run
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, KeyValues, Proposal, Shape
from adapter.fingerprints import TargetFiles, tokenizer_fingerprint

FROM_TARGET = "target"


@dataclass(frozen=True)
class CausalLMConfig:
    """What is needed to build the drafter again, beside its weights. Stored as JSON with the drafter."""

    source: str  # "target", or the checkpoint that it was made from
    layers: int
    draft_vocab: int
    decoder: dict[str, Any]  # the transformers configuration of the decoder

    @property
    def shares_embedding(self) -> bool:
        return self.source == FROM_TARGET

    @property
    def shape(self) -> str:
        return f"{self.layers} layers, {self.draft_vocab} draft tokens"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "CausalLMConfig":
        return CausalLMConfig(data["source"], data["layers"], data["draft_vocab"], dict(data["decoder"]))


class CausalLM(LearntDrafter):
    """A transformers decoder of any architecture, a reduced head, and the map back to the target's tokens."""

    kind = "causal_lm"
    config: CausalLMConfig

    def __init__(self, config: CausalLMConfig, embedding: Tensor) -> None:
        """Random weights of the shape that `config` tells, around the input embedding [V, H], kept frozen.

        Everything but the embedding starts in its dtype on its device; `load_own` fills the weights in.
        """
        super().__init__(config.draft_vocab, embedding)
        self.config = config
        self.decoder = decoder_around(config.decoder, embedding)
        self.head = nn.Linear(embedding.shape[1], config.draft_vocab, bias=False)
        self.head.to(dtype=embedding.dtype, device=embedding.device)

    @staticmethod
    def from_target(model: Any, layers: int, draft_to_target: Tensor) -> "CausalLM":
        """The target `model`'s first layers, its final norm, and its head's rows of the draft tokens.

        The input embedding is the target's own tensor, not a copy. Raises `DrafterRefused` where the target
        has fewer layers.
        """
        decoder = model.get_decoder()
        present = decoder.config.num_hidden_layers
        if not 1 <= layers <= present:
            raise DrafterRefused(f"a drafter of {layers} layers from a target of {present}: ask for 1 to {present}")
        config = CausalLMConfig(FROM_TARGET, layers, len(draft_to_target), first_layers(decoder.config, layers))
        drafter = CausalLM(config, decoder.get_input_embeddings().weight.detach())
        drafter._take(decoder, model.get_output_embeddings().weight, draft_to_target)
        return drafter

    @staticmethod
    def from_checkpoint(
        path: Path, files: TargetFiles, draft_to_target: Tensor | None = None, vocab_size: int | None = None
    ) -> "CausalLM":
        """A causal LM saved by transformers under `path`, all of its layers, in fp32, its embedding its own.

        Its head is cut down to `draft_to_target` (default: all tokens). Models of one family pad their vocabularies
        differently, past the tokenizer's last token: `vocab_size` is the target's (default: the checkpoint's). Raises
        `DrafterRefused` where its tokenizer is not the target's: its token ids would mean other texts.
        """
        if tokenizer_fingerprint(path) != files.tokenizer_fingerprint:
            raise DrafterRefused(
                f"{path} has another tokenizer than the target {files.name}: use a checkpoint of its family"
            )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise DrafterRefused(f"the head of {path} has a bias, which a drafter's has not: use another checkpoint")
        embedding = _padded(decoder.get_input_embeddings().weight.detach(), vocab_size)
        known = min(len(head.weight), len(embedding))
        chosen = torch.arange(known) if draft_to_target is None else draft_to_target[draft_to_target < known]
        layers = decoder.config.num_hidden_layers
        config = CausalLMConfig(str(path), layers, len(chosen), first_layers(decoder.config, layers))
        drafter = CausalLM(config, embedding)
        drafter._take(decoder, head.weight, chosen)
        return drafter

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, H]: the target's, or a checkpoint's own."""
        weight: Tensor = self.decoder.get_input_embeddings().weight.detach()
        return weight

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | dict[str, Tensor] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Final hidden states [B, n, H] of `tokens` [B, n] (target ids) at `positions` [B, n].

        mask: which of the m remembered and new tokens each may attend to, as in `Placement`. Without one the
        attention is plainly causal, and right padding needs none.
        """
        if is_plain(self.decoder) and positions is not None and mask is not None:
            embedded = self.decoder.get_input_embeddings()(tokens)
            return run(self.decoder, embedded, positions, mask, cache)
        out = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **{cache_argument(self.decoder): cache},
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """The final hidden states, once: what it says at depth j of an index is its next token j indices later."""
        yield self.hidden(tokens, positions)

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """A proposal for each row; row i of the batch owns slot i of `memory`."""
        assert memory is not None, "a language model reads from a memory"
        return reading.propose(self, memory, rows, shape)

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """Never called: it has no taps."""
        raise NotImplementedError("a causal_lm drafter reads nothing of the target's hidden states")

    def fresh(self) -> "CausalLM":
        return CausalLM(self.config, self.embedding)

    def shared_names(self) -> set[str]:
        return {f"decoder.{embedding_name(self.decoder)}"} if self.config.shares_embedding else set()

    @torch.no_grad()
    def _take(self, decoder: Any, head: Tensor, draft_to_target: Tensor) -> None:
        """Copy layers and norm from another decoder, and the draft tokens' rows of its head [V, H]."""
        theirs, embedding = decoder.state_dict(), embedding_name(self.decoder)
        for name, tensor in self.decoder.state_dict().items():
            if name != embedding:
                tensor.copy_(theirs[name])
        self.draft_to_target.copy_(draft_to_target)
        self.head.weight.copy_(head[self.draft_to_target])
        self.map_vocabulary()


def _padded(embedding: Tensor, size: int | None) -> Tensor:
    """An embedding of as many tokens as the target's; those that it lacks, which no text has, are zero."""
    if size is None or size == len(embedding):
        return embedding
    padded = embedding.new_zeros(size, embedding.shape[1])
    padded[: len(embedding)] = embedding[:size]
    return padded
