"""The token ids of a prompt, asked of the engine where its answers do not say them (llama.cpp)."""

from service.hosts.sidecar.asking import Asked
from service.hosts.sidecar.engine_client import EngineClient


def prompt_ids(client: EngineClient, asked: Asked) -> list[int]:
    """Empty where the engine does not tell. The chat template and the tokenizer are the engine's own."""
    if isinstance(asked.messages, list) and asked.form.chat:
        text = client.told("/apply-template", {"messages": asked.messages}).get("prompt")
    else:
        text = asked.messages
    if isinstance(text, list):
        return [int(token) for token in text]  # the client's own ids
    if not isinstance(text, str):
        return []
    found = client.told("/tokenize", {"content": text, "add_special": True, "parse_special": True}).get("tokens")
    return [int(token) for token in found] if isinstance(found, list) else []
