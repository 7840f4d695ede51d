"""From a finished generation to a record that ingestion accepts."""

import numpy as np
import pytest

from adapter.policy import Policy
from adapter.target import Target
from service.origin import Origin
from service.recording import record_of
from storage.records import RecordRefused, decode, encode
from storage.validation import validate
from tests.service.engine.oracle import Client, ask, first_layers, random_prompt, running


@pytest.fixture(scope="module")
def client(target: Target) -> Client:
    with running(target, first_layers(target, layers=1), teacher_top_k=8) as engine:
        client = ask(engine, random_prompt(target, 6), max_tokens=40, workload="sql", tenant="acme")
        client.wait()
    return client


def test_a_record_goes_over_the_wire_and_is_accepted(client: Client, target: Target) -> None:
    record = decode(encode(record_of(client.generation, Origin("t", "k", "d"))))
    validate(record, target.vocab_size)
    assert record.output.tolist() == client.tokens
    assert (record.workload, record.tenant, record.drafter, record.greedy) == ("sql", "acme", "d", True)
    assert len(record.rounds) > 0


def test_each_teacher_row_holds_all_the_mass_and_teaches_the_token_at_its_position(client: Client) -> None:
    record = record_of(client.generation, Origin("t", "k", "d"))
    positions, ids, log_probs, tail = record.teacher.arrays()
    assert len(positions) > 3
    assert np.allclose(np.exp(log_probs).sum(1) + np.exp(tail), 1.0, atol=0.01)
    assert (record.output[positions] == ids[:, 0]).all()


def test_a_record_outside_the_vocabulary_is_refused(client: Client) -> None:
    with pytest.raises(RecordRefused, match="outside the vocabulary of 5"):
        validate(record_of(client.generation, Origin("t", "k", "d")), 5)


def test_of_a_client_that_opted_out_only_counts_leave_the_process(target: Target) -> None:
    with running(target, first_layers(target, layers=1)) as engine:
        private = ask(engine, random_prompt(target, 6), train=False)
        private.wait()
    record = record_of(private.generation, Origin("t", "k", "d"))
    validate(record, target.vocab_size)
    assert (len(record.prompt), len(record.output)) == (8, len(private.tokens))
    assert not record.prompt.any()
    assert not record.output.any()
    assert {r.rejected_token for r in record.rounds} <= {0, -1}
    assert record.teacher.positions == b""


def test_text_under_a_penalty_is_not_held_against_the_targets_own_choice(target: Target) -> None:
    penalised = Policy(temperature=0.0, repetition_penalty=1.8)
    with running(target, first_layers(target, layers=1), teacher_top_k=8) as engine:
        client = ask(engine, random_prompt(target, 6), max_tokens=40, policy=penalised)
        client.wait()
    record = record_of(client.generation, Origin("t", "k", "d"))
    assert (record.greedy, record.adjusted, record.exact) == (True, True, False)
    positions, ids, _, _ = record.teacher.arrays()
    assert (record.output[positions] != ids[:, 0]).any()
    validate(record, target.vocab_size)
