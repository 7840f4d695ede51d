"""`redraft init`: version 1 of a drafter of any kind, from the target's own weights or from an existing checkpoint.

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

    from adapter.distil import DistilConfig, Lesson
    from adapter.drafters.learnt import LearntDrafter
    from adapter.drafters.shared import Shared
    from adapter.target import Target
    from storage.records import FeedbackRecord
    from storage.registry import Registry

SAMPLE_PROMPTS = Path(__file__).with_name("sample_prompts.jsonl")
ANSWER_TOKENS = 64
DRAFT_VOCAB = 8192
DEPTHS = 4
RANK = 16
PASSES = 2


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    name: str
    layers: int | None  # None: the kind's own
    draft_vocab: int | None  # None: 8,192, or all of a checkpoint's
    checkpoint: Path | None
    prompts: Path
    warm_up: bool
    kind: str = "causal_lm"
    depths: int = DEPTHS
    rank: int = RANK
    passes: int = PASSES
    host: str = ""  # what is to serve it; empty: any


def init(
    name: Annotated[str, typer.Argument(help="name of the new drafter")],
    kind: Annotated[str, typer.Option(help="causal_lm, medusa, mtp, eagle or streaming")] = "causal_lm",
    layers: Annotated[
        int | None,
        typer.Option(
            help="causal_lm: how many of the target's first layers to take, default 2; "
            "streaming: in how many last ones, default 1",
            min=1,
        ),
    ] = None,
    depths: Annotated[
        int,
        typer.Option(
            help="medusa: its heads; mtp and eagle: how deep they are trained and propose; streaming: its streams",
            min=1,
        ),
    ] = DEPTHS,
    rank: Annotated[int, typer.Option(help="streaming: rank of the adapters", min=1)] = RANK,
    passes: Annotated[
        int,
        typer.Option(
            help="streaming: 1, streams go along in the target's verifying pass; 2: in a short one after it",
            min=1,
            max=2,
        ),
    ] = PASSES,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="tokens that the drafter may propose; default 8192, or all of a checkpoint's", min=1),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="causal_lm: one with the target's tokenizer to start from instead")
    ] = None,
    prompts: Annotated[Path, typer.Option(help='sample prompts: JSON lines, each {"prompt": "..."}')] = SAMPLE_PROMPTS,
    warm_up: Annotated[bool, typer.Option(help="distil on the target's answers to the sample prompts first")] = False,
    host: Annotated[
        str, typer.Option(help="what will serve it, as `redraft hosts` names them: refuse a kind that it cannot")
    ] = "",
) -> None:
    """Make version 1 of a drafter and make it live."""
    logs.configure()
    warn_unknown()
    make(Plan(name, layers, draft_vocab, checkpoint, prompts, warm_up, kind, depths, rank, passes, host))


def make(plan: Plan) -> None:
    """Carry the plan out; the target and its answers only after everything cheap was checked."""
    from adapter.drafters.kinds import kind_of
    from adapter.target import TargetConfig, load, load_embedding
    from adapter.versions import Versions
    from service.hosts.capabilities import check_kind
    from storage.registry import Registry
    from storage.weights import WeightsStore

    kind_of(plan.kind)
    if plan.host:
        check_kind(plan.host, plan.kind)
    if plan.checkpoint is not None and plan.kind != "causal_lm":
        raise CommandError(f"--checkpoint is for causal_lm: a {plan.kind} drafter is made from the target itself")
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
        plan.name, drafter.kind, files.fingerprint, files.tokenizer_fingerprint, config, blob.sha256, blob.size, actor()
    )
    say(
        f"drafter {plan.name} is made for target {files.name}: version 1 is live "
        f"({drafter.kind}, {drafter.config.shape}, {size(blob.size)})"
    )


def first_drafter(plan: Plan, target: "Target", embedding: "Tensor", texts: Sequence[str]) -> "LearntDrafter":
    """Version 1 as planned, in fp32, in which it is kept and learns, around the target's `embedding` [V, H] in fp32."""
    return drafter_from(plan, target, embedding, _answers(target, texts))


def drafter_from(plan: Plan, target: "Target", embedding: "Tensor", answers: "list[FeedbackRecord]") -> "LearntDrafter":
    """The same from the target's answers to the sample prompts."""
    from adapter.drafters.shared import Shared

    drafter = _first(plan, target, Shared(embedding, target.files), answers)
    return _warmed_up(drafter, target, answers) if plan.warm_up else drafter


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


def sample_prompts(target: "Target", texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """The prompts that leave room for an answer, as token ids, and how many tokens that may have."""
    from adapter.sample import chat_prompt

    tokens = min(ANSWER_TOKENS, target.context // 2)
    prompts = [ids for text in texts if len(ids := chat_prompt(target, text)) + tokens <= target.context]
    if not prompts:
        raise CommandError(f"every sample prompt is too long for the target's context of {target.context} tokens")
    return prompts, tokens


def _answers(target: "Target", texts: Sequence[str]) -> "list[FeedbackRecord]":
    """What the target answers to the prompts that leave room for an answer."""
    from adapter.sample import answers

    prompts, tokens = sample_prompts(target, texts)
    say(f"the target answers {len(prompts)} sample prompts, {tokens} tokens each at most")
    return list(answers(target, prompts, tokens))


def _first(plan: Plan, target: "Target", shared: "Shared", answers: "list[FeedbackRecord]") -> "LearntDrafter":
    from adapter.drafters.causal_lm import CausalLM
    from adapter.drafters.kinds import KINDS, Sizes, first_version

    if plan.checkpoint is None:
        vocabulary = _vocabulary(target, answers, plan.draft_vocab or DRAFT_VOCAB)
        sizes = Sizes(plan.layers, plan.depths, plan.rank, plan.passes)
        made = first_version(plan.kind, target.model, shared, vocabulary, sizes)
    else:
        if not plan.checkpoint.is_dir():
            raise CommandError(f"--checkpoint {plan.checkpoint}: no such directory")
        chosen = _vocabulary(target, answers, plan.draft_vocab) if plan.draft_vocab else None
        made = CausalLM.from_checkpoint(plan.checkpoint, target.files, chosen, target.vocab_size)
    tensors = made.own_tensors()
    drafter = KINDS[plan.kind].rebuilt(made.config.to_dict(), shared, tensors)  # the target may be held in less
    drafter.load_own(tensors)
    return drafter


def _vocabulary(target: "Target", answers: "list[FeedbackRecord]", size: int) -> "Tensor":
    from adapter.vocabulary import choose_draft_vocabulary, count_tokens

    emitted = count_tokens((answer.output for answer in answers), target.vocab_size)
    prompted = count_tokens((answer.prompt for answer in answers), target.vocab_size)
    always = [token for token in target.tokenizer.all_special_ids if token < target.vocab_size]
    return choose_draft_vocabulary(emitted, prompted, size, always)


def _warmed_up(drafter: "LearntDrafter", target: "Target", answers: "list[FeedbackRecord]") -> "LearntDrafter":
    from adapter.distil import DistilConfig, distil

    # Nothing was proposed yet, so nothing rejected either: every position counts.
    config = replace(settings(DistilConfig), positions="verified")
    made = distil(drafter, _lesson(drafter, target, answers, config), config)
    say(f"warm-up: {made.report.steps} steps, loss {made.report.first_loss:.3f} -> {made.report.last_loss:.3f}")
    return made.student


def _lesson(
    drafter: "LearntDrafter", target: "Target", answers: "list[FeedbackRecord]", config: "DistilConfig"
) -> "Lesson":
    """The answers, and where the drafter is conditioned on hidden states, what the target had in mind."""
    from adapter.distil import Lesson
    from adapter.rescore import rescore

    if not drafter.taps:
        return Lesson(answers)
    read = list(rescore(target, answers, drafter.taps, max_context=config.max_context))
    hidden = {r.record.record_id: r.hidden for r in read if r.hidden is not None}
    return Lesson([r.record for r in read], hidden=hidden)
