"""A policy: what it allows, and what it says of itself."""

import pytest

from adapter.policy import Policy


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": 3.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
    ],
    ids=str,
)
def test_a_policy_outside_its_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Policy(**bad)  # type: ignore[arg-type]


def test_a_plain_policy_neither_adjusts_nor_truncates() -> None:
    assert not Policy().adjusts
    assert not Policy().truncates


@pytest.mark.parametrize(
    "policy",
    [
        Policy(repetition_penalty=1.1),
        Policy(presence_penalty=0.1),
        Policy(frequency_penalty=-0.1),
        Policy(logit_bias=((1, 1.0),)),
    ],
    ids=str,
)
def test_a_penalty_or_a_bias_adjusts(policy: Policy) -> None:
    assert policy.adjusts


@pytest.mark.parametrize(("temperature", "bucket"), [(0.0, "greedy"), (0.84, "t0.8"), (1.0, "t1.0")])
def test_the_bucket_is_the_temperature_to_one_place(temperature: float, bucket: str) -> None:
    assert Policy(temperature).bucket == bucket
