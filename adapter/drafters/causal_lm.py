"""The `causal_lm` drafter: a small language model of its own, with a head over a reduced draft vocabulary.

Made from the target's first layers (it then shares the target's input embedding, frozen and never part of a
version), or from an existing checkpoint that speaks the target's tokens (then with its own embedding). The
head knows V_d draft tokens; `draft_to_target` [V_d] names them in the target's vocabulary of V.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache

from adapter.drafters.chain import propose_chain
from adapter.drafters.protocol import DraftRow, KeyValues, Proposal
from adapter.fingerprints import TargetFiles, tokenizer_fingerprint

EMBEDDING = "decoder.embed_tokens.weight"
FROM_TARGET = "target"


class DrafterRefused(ValueError):
    """A drafter that cannot be made as asked; the message says why and what to do."""


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "CausalLMConfig":
        return CausalLMConfig(data["source"], data["layers"], data["draft_vocab"], dict(data["decoder"]))


class CausalLM(nn.Module):
    """A transformers decoder of any architecture, a reduced head, and the map back to the target's tokens."""

    draft_to_target: Tensor  # int64 [V_d], part of a version
    target_to_draft: Tensor  # int64 [V]; -1 for the tokens that the drafter never proposes

    def __init__(self, config: CausalLMConfig, embedding: Tensor) -> None:
        """Random weights of the shape that `config` tells, around the input embedding [V, H], kept frozen.

        Everything but the embedding starts in its dtype on its device; `load_own` fills the weights in.
        """
        super().__init__()
        self.config = config
        self.decoder = _decoder(config.decoder, embedding)
        self.head = nn.Linear(embedding.shape[1], config.draft_vocab, bias=False)
        self.head.to(dtype=embedding.dtype, device=embedding.device)
        vocabulary = torch.arange(config.draft_vocab, device=embedding.device)
        self.register_buffer("draft_to_target", vocabulary)
        self.register_buffer("target_to_draft", _inverse(vocabulary, len(embedding)), persistent=False)

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
        config = CausalLMConfig(FROM_TARGET, layers, len(draft_to_target), _first_layers(decoder.config, layers))
        drafter = CausalLM(config, decoder.get_input_embeddings().weight.detach())
        drafter._take(decoder, model.get_output_embeddings().weight, draft_to_target)
        return drafter

    @staticmethod
    def from_checkpoint(path: Path, files: TargetFiles, draft_to_target: Tensor | None = None) -> "CausalLM":
        """A causal LM saved by transformers under `path`, all of its layers, in fp32, its embedding its own.

        Its head is cut down to `draft_to_target` (default: all tokens). Raises `DrafterRefused` where its
        tokenizer is not the target's: its token ids would mean other texts.
        """
        if tokenizer_fingerprint(path) != files.tokenizer_fingerprint:
            raise DrafterRefused(
                f"{path} has another tokenizer than the target {files.name}: use a checkpoint of its family"
            )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        decoder, head = model.get_decoder(), model.get_output_embeddings().weight
        chosen = torch.arange(len(head)) if draft_to_target is None else draft_to_target
        layers = decoder.config.num_hidden_layers
        config = CausalLMConfig(str(path), layers, len(chosen), _first_layers(decoder.config, layers))
        drafter = CausalLM(config, decoder.get_input_embeddings().weight.detach())
        drafter._take(decoder, head, chosen)
        return drafter

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, H]: the target's, or a checkpoint's own."""
        weight: Tensor = self.decoder.get_input_embeddings().weight.detach()
        return weight

    @property
    def vocab_size(self) -> int:
        """V: the size of the target's vocabulary."""
        return len(self.target_to_draft)

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
        out = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V_d] over the draft vocabulary."""
        logits: Tensor = self.head(hidden)
        return logits

    def propose(self, memory: KeyValues, rows: list[DraftRow]) -> Proposal:
        """A chain of up to each row's draft length; row i of the batch owns slot i of `memory`."""
        return propose_chain(self, memory, rows)

    def own_tensors(self) -> dict[str, Tensor]:
        """What a version consists of: weights and `draft_to_target`, but no embedding of the target's."""
        left_out = {EMBEDDING} if self.config.shares_embedding else set()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in left_out}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill in a version's tensors; names and shapes must be exactly those of `own_tensors`."""
        expected = self.own_tensors()
        if expected.keys() != tensors.keys():
            raise DrafterRefused(f"tensors do not fit: {sorted(expected.keys() ^ tensors.keys())}")
        self.load_state_dict(dict(tensors), strict=False)
        self.target_to_draft.copy_(_inverse(self.draft_to_target, self.vocab_size))

    def trainable(self) -> list[nn.Parameter]:
        """The weights that learning changes: all but the embedding."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _take(self, decoder: Any, head: Tensor, draft_to_target: Tensor) -> None:
        """Copy layers and norm from another decoder, and the draft tokens' rows of its head [V, H]."""
        theirs = decoder.state_dict()
        for name, tensor in self.decoder.state_dict().items():
            if f"decoder.{name}" != EMBEDDING:
                tensor.copy_(theirs[name])
        self.draft_to_target.copy_(draft_to_target)
        self.head.weight.copy_(head[self.draft_to_target])
        self.target_to_draft.copy_(_inverse(self.draft_to_target, self.vocab_size))


def _first_layers(config: Any, layers: int) -> dict[str, Any]:
    """A decoder's configuration cut to its first layers, where it lists layers one by one too."""
    data: dict[str, Any] = config.to_dict()
    data["num_hidden_layers"] = layers
    if data.get("layer_types"):
        data["layer_types"] = data["layer_types"][:layers]
    return data


def _decoder(config: Mapping[str, Any], embedding: Tensor) -> Any:
    """A decoder with random weights, made without an embedding of its own: `embedding` is put in, frozen."""
    shape = {**config, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    decoder = AutoModel.from_config(AutoConfig.for_model(**shape)).to(dtype=embedding.dtype, device=embedding.device)
    slot = decoder.get_input_embeddings()
    slot.weight = nn.Parameter(embedding, requires_grad=False)
    slot.num_embeddings = len(embedding)
    decoder.config.vocab_size = len(embedding)
    return decoder.eval()


def _inverse(draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """target_to_draft [V] with -1 for what is not in the map [V_d]."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_to_target.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=draft_to_target.device)
    return inverse
