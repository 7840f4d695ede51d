"""What the target answers to sample prompts, before there is traffic: for the draft vocabulary and warm-up.

Answers come as feedback records, so that warm-up is the same distillation as any other.
"""

import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from adapter.target import Target
from adapter.teacher import teacher_rows
from storage.records import SCHEMA_VERSION, FeedbackRecord, TeacherRows, int32

SOURCE = "sample"


def chat_prompt(target: Target, text: str) -> list[int]:
    """A user's message as token ids, through the tokenizer's chat template where it has one."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def answers(
    target: Target, prompts: Sequence[Sequence[int]], max_tokens: int, batch: int = 16, top_k: int = 64
) -> Iterator[FeedbackRecord]:
    """The target's greedy answers, in the prompts' order, each with teacher rows at all of its positions."""
    for start in range(0, len(prompts), batch):
        yield from _decode(target, prompts[start : start + batch], max_tokens, top_k)


@torch.inference_mode()
def _decode(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int, top_k: int) -> list[FeedbackRecord]:
    """Greedy decoding of one batch, padded on the left so that all rows end together."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    outputs: list[list[int]] = [[] for _ in prompts]
    steps, running, cache = [], set(range(len(prompts))), DynamicCache()
    for _ in range(max_tokens):
        out = target.model(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1)
        logits = out.logits[:, -1]
        steps.append(teacher_rows(range(len(prompts)), logits, top_k))
        chosen = logits.argmax(-1)
        for i in list(running):
            outputs[i].append(int(chosen[i]))
            if outputs[i][-1] in target.eos_ids:
                running.discard(i)
        if not running:
            break
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    return [_record(target, prompt, outputs[i], steps, i) for i, prompt in enumerate(prompts)]


def _record(
    target: Target, prompt: Sequence[int], output: list[int], steps: list[TeacherRows], row: int
) -> FeedbackRecord:
    """One answer as a record: row `row` of every step of its batch, up to the answer's end."""
    rows = [step.arrays() for step in steps[: len(output)]]
    teacher = TeacherRows(
        top_k=steps[0].top_k,
        positions=np.arange(len(output), dtype="<i4").tobytes(),
        ids=b"".join(ids[row].tobytes() for _, ids, _, _ in rows),
        log_probs=b"".join(log_probs[row].astype("<f2").tobytes() for _, _, log_probs, _ in rows),
        tail_log_mass=b"".join(tail[row].tobytes() for _, _, _, tail in rows),
    )
    name = sha256(target.files.fingerprint.encode() + int32(list(prompt))).hexdigest()[:32]
    return FeedbackRecord(
        schema_version=SCHEMA_VERSION,
        record_id=name,
        request_id=name,
        finished_at=time.time(),
        tenant="default",
        workload="default",
        source=SOURCE,
        target_fingerprint=target.files.fingerprint,
        tokenizer_fingerprint=target.files.tokenizer_fingerprint,
        drafter="",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        structured=False,
        lossless=True,
        train=True,
        prompt_ids=int32(list(prompt)),
        output_ids=int32(output),
        finish_reason="stop" if output[-1] in target.eos_ids else "length",
        rounds=(),
        teacher=teacher,
        time_to_first_token_ms=0.0,
        total_ms=0.0,
        resident_mb=0.0,
    )
