"""A client's prompt to the token ids that the target reads."""

from typing import Any

from adapter.target import Target
from service.openai_errors import bad_request
from service.openai_schema import ChatRequest, CompletionRequest


def chat_ids(target: Target, body: ChatRequest) -> list[int]:
    """The messages under the target's own chat template, up to where the assistant begins to speak."""
    messages = [message.for_template() for message in body.messages]
    try:
        ids: list[int] = target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's maker: it can raise anything
        raise bad_request(f"the target's chat template refuses these messages: {error}", "messages") from error
    return _checked(target, ids, "messages")


def completion_ids(target: Target, body: CompletionRequest) -> list[int]:
    """The one prompt of a completion: a text, tokenized as the tokenizer does by default, or token ids."""
    prompt = _single(body.prompt)
    if isinstance(prompt, str):
        ids: list[int] = target.tokenizer(prompt)["input_ids"]
        return _checked(target, ids, "prompt")
    return _checked(target, prompt, "prompt")


def _single(prompt: str | list[str] | list[int] | list[list[int]]) -> str | list[int]:
    """The only prompt of a request that may wrap it in a list."""
    if isinstance(prompt, str):
        return prompt
    if not any(isinstance(item, int) for item in prompt):
        if len(prompt) != 1:
            raise bad_request(f"{len(prompt)} prompts in one request: send one request a prompt", "prompt")
        return _as_prompt(prompt[0])
    return _as_prompt(prompt)


def _as_prompt(prompt: Any) -> str | list[int]:
    checked: str | list[int] = prompt
    return checked


def _checked(target: Target, ids: list[int], param: str) -> list[int]:
    if not ids:
        raise bad_request(f"{param} holds no token: the target needs one to continue from", param)
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise bad_request(f"token ids lie between 0 and {target.vocab_size - 1}", param)
    return ids
