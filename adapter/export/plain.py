"""A `causal_lm` drafter as an ordinary language model with a head over all V tokens: what both file formats write.

Engines know no draft vocabulary, and their Llama has no bias on the head that could silence the tokens outside it. A
row of zeros would not do: a logit of 0 can win, and takes its share of the softmax. So the model is made a little
wider. The first new units carry a tiny constant from the embedding on; no layer reads or writes them, as their norms'
weights are zero there. Only the final norm lets them through, which divides by the size r of the state: they come out
as LOUD * CONSTANT / r, always above zero, and the head's rows outside the draft vocabulary turn that into a logit of
-2^20 / r. With r at most 10,000 such a token's probability is exactly zero in 32 bits, and it cannot win.

The tokens inside keep their logits. A norm's mean now runs over more units, which its weight and epsilon undo; what is
left is the constant's own part in the mean square, 2^-22 beside |state|^2 + epsilon * H: under what 32 bits resolve for
states of the size that embeddings have. All constants are exact in 16 bits of either kind.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.learnt import DrafterRefused, LearntDrafter

CONSTANT = 2.0**-12
LOUD = 2.0**15
UNITS = 4  # that carry the constant
ALIGNMENTS = (128, 64, 32, 16, 8)  # the widest of these that costs at most an eighth
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
READERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
WRITERS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
WITHIN = (
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "q_norm.weight",
    "k_norm.weight",
    "gate_proj.bias",
    "up_proj.bias",
)


class AlreadyThere(FileExistsError):
    """Something is where the files were to be written; nothing is written over."""


@dataclass(frozen=True)
class Plain:
    """A language model by transformers' names for its parts, tensors in fp32."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def plain(drafter: LearntDrafter, whole_heads: bool = True) -> Plain:
    """The same proposals from an ordinary model. Raises `DrafterRefused` for what cannot be one.

    With `whole_heads` the width stays a multiple of the number of heads, as transformers wants it of a Llama.
    """
    made = _ordinary(_exportable(drafter))
    if len(drafter.draft_to_target) == drafter.vocab_size:
        return made
    outside = drafter.target_to_draft.cpu() < 0
    heads = made.config["num_attention_heads"] if whole_heads else 1
    return _silenced(made, outside, _width(made.config["hidden_size"], heads))


def _exportable(drafter: LearntDrafter) -> CausalLM:
    if not isinstance(drafter, CausalLM):
        raise DrafterRefused(
            f"a {drafter.kind} drafter is no language model of its own: it reads the target's hidden states by "
            f"redraft's own rules, and no engine has a format for it. Only causal_lm can be exported"
        )
    family = drafter.decoder.config.model_type
    if family not in FAMILIES:
        raise DrafterRefused(
            f"a drafter with a {family} decoder cannot be exported yet: it is spelt for {', '.join(FAMILIES)}"
        )
    return drafter


@torch.no_grad()
def _ordinary(drafter: CausalLM) -> Plain:
    """As it is, with a head over all tokens whose rows outside the draft vocabulary are zero."""
    tensors = {f"model.{name}": _fp32(tensor) for name, tensor in drafter.decoder.state_dict().items()}
    rows = _fp32(drafter.head.weight)
    head = torch.zeros(drafter.vocab_size, rows.shape[1])
    head[drafter.draft_to_target.cpu()] = rows
    config = drafter.decoder.config.to_dict()
    config.update({name: drafter.config.decoder.get(name) for name in SPECIAL})  # the decoder was built without them
    config.update({"vocab_size": drafter.vocab_size, "tie_word_embeddings": False})
    return spelt(config, {**tensors, HEAD: head})


def spelt(config: dict[str, Any], tensors: dict[str, Tensor]) -> Plain:
    """A model of these families as engines read it: with the size of its heads, and never as a Qwen2."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    made = Plain({**config, "head_dim": head}, tensors)
    return _as_llama(made) if config["model_type"] == "qwen2" else made


def held(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the dtype of the files. One that is too large for 16 bits would be infinite, and engines would say
    nothing: `DrafterRefused` is raised.
    """
    made = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(made).all()):
        raise DrafterRefused(f"{name} does not fit into {dtype}: export in another dtype")
    return made


def _as_llama(qwen: Plain) -> Plain:
    """A Qwen2 is a Llama with biases, and engines take a width of its own from a Llama only."""
    config = qwen.config
    if config.get("use_sliding_window"):
        raise DrafterRefused("a qwen2 decoder with sliding windows cannot be exported: a Llama has none")
    zeros = {
        f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(config["hidden_size"])
        for layer in range(config["num_hidden_layers"])
    }
    dropped = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
    kept = {name: value for name, value in config.items() if name not in dropped}
    return Plain(
        {**kept, "model_type": "llama", "architectures": None, "attention_bias": True, "mlp_bias": False},
        {**qwen.tensors, **zeros},
    )


def _width(hidden: int, heads: int) -> int:
    """The next width after `hidden` that is as round as it can be without costing more than an eighth."""
    for alignment in ALIGNMENTS:
        step = math.lcm(heads, alignment)
        wider = (hidden // step + 1) * step
        if wider - hidden >= UNITS and wider <= hidden + hidden // 8:
            break
    return wider


def _silenced(model: Plain, outside: Tensor, width: int) -> Plain:
    """The model at another width, with the tokens that are `outside` [V] silenced as told above."""
    hidden = model.config["hidden_size"]
    more, share = width - hidden, hidden / width
    tensors = {name: _wider(name, tensor, more, share) for name, tensor in model.tensors.items()}
    units = slice(hidden, hidden + UNITS)
    tensors[EMBEDDING][:, units] = CONSTANT
    tensors[NORM][units] = LOUD
    tensors[HEAD][outside, units] = -LOUD
    return Plain({**model.config, "hidden_size": width, "rms_norm_eps": model.config["rms_norm_eps"] * share}, tensors)


def _wider(name: str, tensor: Tensor, more: int, share: float) -> Tensor:
    """One tensor of a model of that many more units, in which it does what it did."""
    if name in (EMBEDDING, HEAD) or name.endswith(READERS):
        return pad(tensor, (0, more))
    if name == NORM or name.endswith(NORMS):
        return pad(tensor * share**0.5, (0, more))
    if name.endswith(WRITERS):
        return pad(tensor, (0, more) if tensor.dim() == 1 else (0, 0, 0, more))
    if name.endswith(WITHIN):
        return tensor
    raise DrafterRefused(f"{name} is no tensor of a decoder that this export knows ({', '.join(FAMILIES)})")


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().float()
