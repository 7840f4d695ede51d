"""The tokenizer's part of a GGUF file: copied from another GGUF file, or written from a tokenizer.json.

Written are byte-level BPE tokenizers whose way of cutting text into words llama.cpp has a name for. That name matters
only to a file that is given text, the target's: a drafter is given token ids.
"""

import json
from pathlib import Path
from typing import Any

import gguf
from gguf.constants import GGUFValueType

from adapter.drafters.learnt import DrafterRefused

COPY = "name the target's own GGUF file with --like, and its tokenizer is copied"
LIKE_KEYS = ("tokenizer.",)
REQUIRED = "tokenizer.ggml.tokens"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of token
_BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_BEFORE + r"\p{N}{1,3}" + _AFTER: "llama-bpe", _BEFORE + r"\p{N}" + _AFTER: "qwen2"}


def copy_tokenizer(writer: gguf.GGUFWriter, like: Path, target: Path, vocabulary: int) -> None:
    """All of the tokenizer of the GGUF file `like`, which must be that of the transformers directory `target`."""
    try:
        fields = gguf.GGUFReader(like).fields
    except (OSError, ValueError) as error:
        raise DrafterRefused(f"{like} cannot be read as GGUF: {error}") from error
    if REQUIRED not in fields:
        raise DrafterRefused(f"{like} has no tokenizer: it must be the GGUF file that llama.cpp serves as the target")
    _check_same(fields[REQUIRED].contents(), target, vocabulary, like)
    for key, field in fields.items():
        if key.startswith(LIKE_KEYS):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)


def write_tokenizer(writer: gguf.GGUFWriter, target: Path, vocabulary: int) -> None:
    """The tokenizer of the transformers directory `target`, up to `vocabulary` tokens."""
    data = _tokenizer_json(target)
    model = data["model"]
    if model.get("type", "BPE") != "BPE" or "ByteLevel" not in json.dumps(data.get("pre_tokenizer")):
        raise DrafterRefused(f"the tokenizer of {target} is no byte-level BPE: {COPY}")
    texts, types = _tokens(data, vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_words(data["pre_tokenizer"], target))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    _special(writer, target, texts)


def _tokens(data: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids that the tokenizer does not use are named so."""
    texts, types = [f"[PAD{token}]" for token in range(vocabulary)], [UNUSED] * vocabulary
    for text, token in data["model"]["vocab"].items():
        texts[token], types[token] = text, NORMAL
    for added in data.get("added_tokens", ()):
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return texts, types


def _words(pre_tokenizer: dict[str, Any], target: Path) -> str:
    """What llama.cpp calls this way of cutting text into words."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and steps[0]["pattern"].get("Regex") in SPLITS:
        return SPLITS[steps[0]["pattern"]["Regex"]]
    raise DrafterRefused(f"the tokenizer of {target} cuts text in a way that has no name here: {COPY}")


def _special(writer: gguf.GGUFWriter, target: Path, texts: list[str]) -> None:
    """Ends and starts as the target's tokenizer has them, and its chat template."""
    config = json.loads((target / "tokenizer_config.json").read_text())
    adders = {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "unk_token": writer.add_unk_token_id,
        "pad_token": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        text = config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if text in texts:
            add(texts.index(text))
    writer.add_add_bos_token(bool(config.get("add_bos_token", False)))
    template = target / "chat_template.jinja"
    written = template.read_text() if template.is_file() else config.get("chat_template")
    if isinstance(written, str):
        writer.add_chat_template(written)


def _check_same(tokens: list[str], target: Path, vocabulary: int, like: Path) -> None:
    """The drafter's ids must mean the same texts there; llama.cpp would draft with it all the same, for nothing."""
    if len(tokens) != vocabulary:
        raise DrafterRefused(f"{like} has {len(tokens)} tokens, and the target {vocabulary}: it is another model's")
    ours = _tokenizer_json(target)["model"]["vocab"]
    texts = ours.items() if isinstance(ours, dict) else ((piece[0], token) for token, piece in enumerate(ours))
    differ = [token for text, token in texts if tokens[token] != text]
    if differ:
        raise DrafterRefused(
            f"{like} calls token {differ[0]} {tokens[differ[0]]!r}, which the target does not ({len(differ)} differ): "
            f"it is another model's"
        )


def _tokenizer_json(target: Path) -> dict[str, Any]:
    file = target / "tokenizer.json"
    if not file.is_file():
        raise DrafterRefused(f"there is no tokenizer.json in {target}: {COPY}")
    data: dict[str, Any] = json.loads(file.read_text())
    return data
