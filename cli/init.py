"""`redraft init`: version 1 of a drafter, from the target's first layers or from an existing checkpoint.

Sample prompts go through the target; what it answers decides which tokens the drafter may propose, and is what
a warm-up learns from. Nothing is registered before the weights are stored and checked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import logs
from cli.output import CommandError, say, size
from cli.settings import actor, settings, warn_unknown
from storage.config import StorageConfig

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from torch import Tensor

    from adapter.drafters.causal_lm import CausalLM
    from adapter.target import Target
    from storage.records import FeedbackRecord
    from storage.registry import Registry

SAMPLE_PROMPTS = Path(__file__).with_name("sample_prompts.jsonl")
ANSWER_TOKENS = 64
DRAFT_VOCAB = 8192


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    name: str
    layers: int
    draft_vocab: int | None  # None: 8,192, or all of a checkpoint's
    checkpoint: Path | None
    prompts: Path
    warm_up: bool


def init(
    name: Annotated[str, typer.Argument(help="name of the new drafter")],
    layers: Annotated[int, typer.Option(help="how many of the target's first layers to take", min=1)] = 2,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="tokens that the drafter may propose; default 8192, or all of a checkpoint's", min=1),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="a causal LM with the target's tokenizer to start from instead")
    ] = None,
    prompts: Annotated[Path, typer.Option(help='sample prompts: JSON lines, each {"prompt": "..."}')] = SAMPLE_PROMPTS,
    warm_up: Annotated[bool, typer.Option(help="distil on the target's answers to the sample prompts first")] = False,
) -> None:
    """Make version 1 of a drafter and make it live."""
    logs.configure()
    warn_unknown()
    make(Plan(name, layers, draft_vocab, checkpoint, prompts, warm_up))


def make(plan: Plan) -> None:
    """Carry the plan out; the target and its answers only after everything cheap was checked."""
    from adapter.target import TargetConfig, load, load_embedding
    from adapter.versions import KIND, Versions
    from storage.registry import Registry
    from storage.weights import WeightsStore

    texts = read_prompts(plan.prompts)
    registry = Registry(_database())
    _check_name(registry, plan.name)
    target = load(settings(TargetConfig))
    embedding = load_embedding(target.files).to(target.device)
    drafter = first_drafter(plan, target, embedding, texts)
    store = WeightsStore(settings(StorageConfig).weights_folder)
    blob = Versions(store, target.files, embedding).save(drafter)
    files, config = target.files, drafter.config.to_dict()
    registry.create_drafter(
        plan.name, KIND, files.fingerprint, files.tokenizer_fingerprint, config, blob.sha256, blob.size, actor()
    )
    say(
        f"drafter {plan.name} is made for target {files.name}: version 1 is live "
        f"({drafter.config.layers} layers, {drafter.config.draft_vocab} draft tokens, {size(blob.size)})"
    )


def first_drafter(plan: Plan, target: "Target", embedding: "Tensor", texts: Sequence[str]) -> "CausalLM":
    """Version 1 as planned, around the target's `embedding` [V, H] in fp32."""
    answers = _answers(target, texts)
    drafter = _with_fp32_embedding(_first(plan, target, answers), embedding)
    return _warmed_up(drafter, answers) if plan.warm_up else drafter


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON-lines file; raises `CommandError` naming the line that cannot be used."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompts {path} cannot be read: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f'{path}, line {number}: not a JSON object with a "prompt"') from error
        if not isinstance(text, str) or not text:
            raise CommandError(f'{path}, line {number}: "prompt" is no text')
        texts.append(text)
    if not texts:
        raise CommandError(f"{path} holds no prompts")
    return texts


def _database() -> "Engine":
    """The database; the embedded one is brought to this version's tables at once, a production one must be."""
    from storage.database import check_migrated, migrate, open_database

    config = settings(StorageConfig)
    database = open_database(config.sql_url)
    check_migrated(database) if config.database_url else migrate(database)
    return database


def _check_name(registry: "Registry", name: str) -> None:
    from storage.registry import DrafterExists

    if not name.strip():
        raise CommandError("a drafter needs a name")
    if name in {drafter.name for drafter in registry.drafters(include_retired=True)}:
        raise DrafterExists(f"there is a drafter {name!r} already: choose another name")


def _answers(target: "Target", texts: Sequence[str]) -> "list[FeedbackRecord]":
    """What the target answers to the prompts that leave room for an answer."""
    from adapter.sample import answers, chat_prompt

    tokens = min(ANSWER_TOKENS, target.context // 2)
    prompts = [ids for text in texts if len(ids := chat_prompt(target, text)) + tokens <= target.context]
    if not prompts:
        raise CommandError(f"every sample prompt is too long for the target's context of {target.context} tokens")
    say(f"the target answers {len(prompts)} sample prompts, {tokens} tokens each at most")
    return list(answers(target, prompts, tokens))


def _first(plan: Plan, target: "Target", answers: "list[FeedbackRecord]") -> "CausalLM":
    from adapter.drafters.causal_lm import CausalLM

    if plan.checkpoint is None:
        vocabulary = _vocabulary(target, answers, plan.draft_vocab or DRAFT_VOCAB)
        return CausalLM.from_target(target.model, plan.layers, vocabulary)
    if not plan.checkpoint.is_dir():
        raise CommandError(f"--checkpoint {plan.checkpoint}: no such directory")
    chosen = _vocabulary(target, answers, plan.draft_vocab) if plan.draft_vocab else None
    return CausalLM.from_checkpoint(plan.checkpoint, target.files, chosen).to(target.device)


def _vocabulary(target: "Target", answers: "list[FeedbackRecord]", size: int) -> "Tensor":
    from adapter.vocabulary import choose_draft_vocabulary, count_tokens

    emitted = count_tokens((answer.output for answer in answers), target.vocab_size)
    prompted = count_tokens((answer.prompt for answer in answers), target.vocab_size)
    always = [token for token in target.tokenizer.all_special_ids if token < target.vocab_size]
    return choose_draft_vocabulary(emitted, prompted, size, always)


def _with_fp32_embedding(drafter: "CausalLM", embedding: "Tensor") -> "CausalLM":
    """The drafter in fp32, in which it is kept and learns, whatever the target is held in."""
    from adapter.drafters.causal_lm import CausalLM

    twin = CausalLM(drafter.config, embedding if drafter.config.shares_embedding else drafter.embedding.float())
    twin.load_own(drafter.own_tensors())
    return twin


def _warmed_up(drafter: "CausalLM", answers: "list[FeedbackRecord]") -> "CausalLM":
    from adapter.distil import DistilConfig, Lesson, distil

    # Nothing was proposed yet, so nothing rejected either: every position counts.
    made = distil(drafter, Lesson(answers), replace(settings(DistilConfig), positions="verified"))
    say(f"warm-up: {made.report.steps} steps, loss {made.report.first_loss:.3f} -> {made.report.last_loss:.3f}")
    return made.student
