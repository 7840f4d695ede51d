"""The target's answers to sample prompts."""

import pytest
import torch

from adapter.sample import answers, chat_prompt
from adapter.target import Target
from storage.records import FeedbackRecord
from storage.validation import validate


def test_a_batch_of_prompts_of_unequal_lengths_is_answered_as_each_alone(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    alone = [next(answers(target, [r.prompt.tolist()], 24, batch=1, top_k=16)) for r in answered[:6]]
    assert [r.output.tolist() for r in answered[:6]] == [r.output.tolist() for r in alone]


def test_an_answer_is_what_a_full_forward_a_token_chooses(target: Target, answered: list[FeedbackRecord]) -> None:
    sequence = answered[0].prompt.tolist()
    for token in answered[0].output.tolist():
        assert int(target.model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()) == token
        sequence.append(token)


def test_each_position_has_its_row_and_the_row_teaches_that_position(answered: list[FeedbackRecord]) -> None:
    for record in answered:
        positions, ids, _, _ = record.teacher.arrays()
        assert positions.tolist() == list(range(len(record.output)))
        assert ids[:, 0].tolist() == record.output.tolist()


def test_answers_are_sound_feedback_records(target: Target, answered: list[FeedbackRecord]) -> None:
    for record in answered:
        validate(record, target.vocab_size)


def test_an_answer_ends_with_the_end_of_text(target: Target, answered: list[FeedbackRecord]) -> None:
    for record in answered:
        assert not target.eos_ids & set(record.output[:-1].tolist())
        assert (record.finish_reason == "stop") == (int(record.output[-1]) in target.eos_ids)


def test_a_prompt_goes_through_the_chat_template(target: Target) -> None:
    text = target.tokenizer.decode(chat_prompt(target, "hello"))
    assert text == "<|start|>user\nhello<|end|><|start|>assistant\n"


def test_without_a_chat_template_the_text_itself_is_the_prompt(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    assert target.tokenizer.decode(chat_prompt(target, "hello")) == "hello"
