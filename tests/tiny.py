"""A tiny random target on disk: a Llama of a few thousand weights with a real byte-level BPE tokenizer.

Small enough that a test makes one in well under a second; complete enough (chat template, end-of-sequence
id, safetensors) that everything which loads a real target loads this one.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "the drafter proposes a few tokens and the target verifies them in one pass",
    "select name from city where country = 'France' order by population",
    "def add(first, second): return first + second",
    "Hello, world! How are you today? Fine, thank you.",
)
"""What the tokenizer is trained on; also handy as prompts."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""Of models of other families, which any configuration of transformers takes."""

END = "<|end|>"
START = "<|start|>"


def tiny_tokenizer(vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer of `vocab_size` ids; any text goes through it and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_target_dir(
    path: Path, *, seed: int = 0, layers: int = 2, hidden: int = 32, context: int = 512, scale: float = 0.3
) -> Path:
    """Save a random fp32 Llama and its tokenizer under `path` and return it.

    `scale` is the spread of the weights: with the usual 0.02 every next token would be nearly as likely as
    every other, and near-ties would make exactness tests say nothing.
    """
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
