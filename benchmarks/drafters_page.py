"""A report on drafters as one HTML file that needs nothing else: plots inline, then the table, then what words mean."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from benchmarks.drafters import DraftersReport
from benchmarks.drafters_plots import plots
from benchmarks.drafters_rows import Best, meanings
from benchmarks.page import document, machine_line, shown, words


def page(report: DraftersReport) -> str:
    """The whole document."""
    parts = [
        *(f"<p>{escape(line)}</p>" for line in _settings(report)),
        f"<ul>{''.join(f'<li>{escape(told(best))}</li>' for best in report.best)}</ul>",
        *(f"<h2>{escape(title)}</h2>{svg}" for title, svg in plots(report.rows).items()),
        "<h2>All figures</h2>",
        _table([asdict(row) for row in report.rows]),
        "<h2>Plain decoding</h2>",
        _table([asdict(row) for row in report.plain]),
        "<h2>What the words mean</h2>",
        words(meanings()),
    ]
    return document("redraft bench drafters", parts)


def told(best: Best) -> str:
    """A sentence on a workload's best kind, and on what bounds it."""
    floor = "" if best.ngram_speed_up is None else f"; ngram reaches {best.ngram_speed_up:.2f}"
    return (
        f"{best.workload}: {best.kind} ({best.shape}) has {best.speed_up:.2f} times the accepted progress of plain "
        f"decoding: {best.tokens_per_round:.2f} tokens a round that costs {best.round_cost:.2f} target steps{floor}"
    )


def _settings(report: DraftersReport) -> Iterator[str]:
    settings, learning = report.settings, report.learning
    yield machine_line(report.machine)
    trees = f"trees of at most {settings.nodes} tokens" if settings.nodes else "no trees"
    yield (
        f"k {settings.draft_length}, {trees}, batch {settings.batch}; {settings.traffic.held_out} unseen prompts of a "
        f"workload are replayed and {settings.decoded} of them decoded, at most {settings.traffic.max_tokens} tokens "
        f"each, {settings.repeats} repeats, all arms of a workload interleaved in one process"
    )
    whose = "all workloads together" if settings.together else "each workload by itself"
    yield (
        f"each kind learned from {settings.traffic.requests} records of a workload, {whose}, in {learning.epochs} "
        f"passes, from {'a warmed-up' if settings.warm_start else 'an untrained'} version 1"
    )
    for refused in report.refused:
        yield f"{refused.workload or 'all workloads'}: {refused.kind} is left out: {refused.reason}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(shown(v))}</td>' for v in row.values())}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
