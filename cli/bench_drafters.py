"""`redraft bench drafters`: every kind of drafter on the same target, the same records and the same unseen prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.bench_input import FileOption, TokensOption, chosen_names, prepare, texts_of
from cli.init import SAMPLE_PROMPTS, Plan, drafter_from, read_prompts, sample_prompts
from cli.output import CommandError, as_json, figure, say, table, write
from cli.settings import settings

if TYPE_CHECKING:
    from adapter.drafters.learnt import LearntDrafter
    from adapter.target import Target
    from benchmarks.drafters import DraftersSettings, Starts
    from benchmarks.drafters_rows import DrafterRow
    from storage.records import FeedbackRecord

COLUMNS = (
    "kind", "shape", "weights", "probability", "length", "draft cost", "round cost", "tokens/round", "tokens/s",
    "progress", "speed-up", "training s", "same as plain",
)  # fmt: skip
LEGEND = (
    "weights: of its own, millions; probability, length: of acceptance (before: of version 1); draft cost: of one "
    "token, round cost: of a whole round, in target steps; progress: accepted tokens a ms; speed-up: its ratio to "
    "plain; training s: for a thousand records"
)


def drafters(
    workload: Annotated[
        list[Path], typer.Option(help='JSON lines, each {"prompt": "..."}; the file gives its name; repeatable')
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="further workloads")] = None,
    requests: Annotated[int, typer.Option(help="records of each workload to learn from", min=1)] = 64,
    unseen: Annotated[int, typer.Option(help="further prompts of each workload, to judge by", min=1)] = 8,
    decoded: Annotated[int | None, typer.Option(help="of these, with every arm; default: all", min=1)] = None,
    kinds: Annotated[str, typer.Option(help="separated by commas; default: all there are, and ngram")] = "",
    k: Annotated[int, typer.Option("--k", help="draft length", min=1)] = 4,
    nodes: Annotated[int, typer.Option(help="tokens of a tree at most; 0: no trees", min=0)] = 15,
    max_tokens: TokensOption = 96,
    batch: Annotated[int, typer.Option(help="requests in flight", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="runs of each arm, in turn; figures are medians", min=1)] = 2,
    passes: Annotated[int | None, typer.Option(help="over the records; default: REDRAFT_EPOCHS", min=1)] = None,
    together: Annotated[
        bool, typer.Option("--together", help="one student of a kind for all workloads, not one for each")
    ] = False,
    warm_start: Annotated[
        bool, typer.Option(help="version 1 is distilled on the target's answers to sample prompts first")
    ] = False,
    json: FileOption = None,
    html: Annotated[Path | None, typer.Option(help="file to write a page with plots to")] = None,
) -> None:
    """Teach a drafter of each kind, and hold chains, trees and the governor's choice against plain decoding.

    The target's answers are made once and kept in the cache folder (REDRAFT_CACHE).
    """
    decoded = decoded or unseen
    _check(k, nodes, unseen, decoded, batch)
    texts = texts_of([*workload, *(more or [])])
    prepare()
    from adapter.distil import DistilConfig
    from adapter.target import TargetConfig, load
    from benchmarks.answers import segment
    from benchmarks.drafters import DraftersSettings, Subject, measure
    from benchmarks.drafters_page import page, told
    from benchmarks.experiment import Traffic
    from benchmarks.workload import workload as prepared
    from service.engine.engine import EngineConfig
    from service.engine.governor import GovernorConfig

    traffic = Traffic(requests, unseen, max_tokens, 0)
    asked = DraftersSettings(traffic, decoded, _kinds(kinds), k, nodes, batch, repeats, together, warm_start)
    distil = settings(DistilConfig)
    distil = replace(distil, epochs=passes or distil.epochs, positions="verified")  # nothing was proposed yet
    _say_plan(asked, tuple(texts), distil.epochs)
    target, folder = load(settings(TargetConfig)), settings(TargetConfig).cache.expanduser() / "bench"
    room, count = target.context - max_tokens, requests + unseen
    workloads = [prepared(name, found, target, count, room) for name, found in texts.items()]
    segments = [segment(target, found, unseen, max_tokens, traffic.seed, folder, say) for found in workloads]
    subject = Subject(target, settings(EngineConfig), settings(GovernorConfig), distil)
    report = measure(subject, segments, _starts(asked, target, folder), asked, say)
    _show(report.rows)
    for best in report.best:
        say(told(best))
    write(json, as_json(report.as_json()))
    if html is not None:
        write(html, page(report))


def _check(k: int, nodes: int, unseen: int, decoded: int, batch: int) -> None:
    """What can be seen to be wrong before anything slow; raises `CommandError`."""
    if nodes and nodes <= k:
        raise CommandError(f"--nodes {nodes} is no tree of depth {k}: ask for more than --k, or for 0: no trees")
    if nodes and k < 2:
        raise CommandError("--k 1 leaves nothing for a tree to grow from: ask for 2 or more, or for --nodes 0")
    if decoded > unseen:
        raise CommandError(f"--decoded {decoded} is more than --unseen {unseen}: ask for as many or fewer")
    if decoded < batch:
        raise CommandError(f"{decoded} prompts to decode do not fill a batch of {batch}: ask for as many or more")


def _kinds(text: str) -> tuple[str, ...]:
    from adapter.drafters.kinds import KINDS
    from adapter.drafters.ngram import Ngram

    return chosen_names("--kinds", text, (*KINDS, Ngram.kind))


def _say_plan(asked: "DraftersSettings", workloads: Sequence[str], passes: int) -> None:
    traffic = asked.traffic
    arms = 1 + len(asked.shapes) * len(asked.kinds)
    tokens = len(workloads) * arms * asked.repeats * asked.decoded * traffic.max_tokens
    say(
        f"{', '.join(asked.kinds)} on {', '.join(workloads)}: each learns from {traffic.requests} records of a "
        f"workload in {passes} passes; then {arms} arms decode {asked.decoded} unseen prompts, at most "
        f"{traffic.max_tokens} tokens each, {asked.repeats} times: {tokens:,} tokens in all"
    )


def _starts(asked: "DraftersSettings", target: "Target", folder: Path) -> "Starts":
    """How version 1 of each kind is made; the sample prompts are answered once, when the first asks for it."""
    from adapter.drafters.ngram import Ngram
    from adapter.target import load_embedding

    embedding = load_embedding(target.files).to(target.device)
    answers = cache(partial(_sample_answers, target, folder))

    def start(kind: str) -> "Callable[[], LearntDrafter]":
        plan = Plan("bench", None, None, None, SAMPLE_PROMPTS, asked.warm_start, kind, asked.draft_length)
        return lambda: drafter_from(plan, target, embedding, answers())

    return {kind: start(kind) for kind in asked.kinds if kind != Ngram.kind}


def _sample_answers(target: "Target", folder: Path) -> "list[FeedbackRecord]":
    from benchmarks.answers import answered
    from benchmarks.workload import Workload

    prompts, tokens = sample_prompts(target, read_prompts(SAMPLE_PROMPTS))
    return list(answered(target, Workload("sample prompts", tuple(map(tuple, prompts))), tokens, folder, say))


def _show(rows: "Sequence[DrafterRow]") -> None:
    """A table for each workload; the file has all figures."""
    for workload in dict.fromkeys(row.workload for row in rows):
        found = [_cells(row) for row in rows if row.workload == workload]
        table(f"\n{workload}", COLUMNS, found, right=COLUMNS[2:-1])
    say(f"\n{LEGEND}\n")


def _cells(row: "DrafterRow") -> tuple[str, ...]:
    return (
        row.kind,
        row.shape,
        figure(row.parameters / 1e6, 1),
        _gained(row.acceptance_probability_before, row.acceptance_probability, 3),
        _gained(row.acceptance_length_before, row.acceptance_length, 2),
        figure(row.draft_cost),
        figure(row.round_cost, 2),
        figure(row.tokens_per_round, 2),
        figure(row.tokens_per_second, 1),
        figure(row.accepted_progress, 4),
        figure(row.speed_up, 2),
        figure(row.training_seconds_per_thousand, 1),
        _same(row),
    )


def _gained(before: float | None, after: float | None, digits: int) -> str:
    return figure(after, digits) if before is None else f"{figure(before, digits)} -> {figure(after, digits)}"


def _same(row: "DrafterRow") -> str:
    said = f"{row.identical}/{row.requests * row.repeats}"
    said += f", {row.near_ties} near-ties" if row.near_ties else ""
    return said + (f", {row.different} DIFFER" if row.different else "")
