"""A decode report as one HTML file that needs nothing else: plots inline, then the table, then what words mean."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape

from benchmarks.decode import Report
from benchmarks.figures import Row, without_repeats
from benchmarks.machine import Machine
from benchmarks.meanings import MEANINGS
from benchmarks.plots import plots

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222 }
h1, h2 { font-weight: 600 } svg { max-width: 100%; height: auto }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { position: sticky; top: 0; background: #fff } td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
dt { font-weight: 600 } dd { margin: 0 0 .4rem 1rem } .on { color: #18722b } .off { color: #a11 }
"""


def page(report: Report) -> str:
    """The whole document."""
    parts = [
        _settings(report),
        *(f"<h2>{escape(title)}</h2>{svg}" for title, svg in plots(report.rows).items()),
        "<h2>All figures</h2>",
        _table(report),
        "<h2>What the words mean</h2>",
        words(MEANINGS),
    ]
    return document("redraft bench decode", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """One HTML file of these parts."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    return "\n".join([head, f"<style>{STYLE}</style></head><body><h1>{title}</h1>", *parts, "</body></html>\n"])


def machine_line(machine: Machine) -> str:
    """Where it was measured."""
    return (
        f"{machine.target} in {machine.dtype} on {machine.cpu}, {machine.cores} cores, {machine.threads} threads, "
        f"torch {machine.torch}, transformers {machine.transformers}"
    )


def _settings(report: Report) -> str:
    settings = report.settings
    lines = (
        machine_line(report.machine),
        f"drafter {settings.drafter or '-'}, version {settings.version}; {settings.requests} requests of at most "
        f"{settings.max_tokens} tokens, {settings.repeats} repeats, all arms interleaved in one process",
    )
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table(report: Report) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in Row.__dataclass_fields__)
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in without_repeats(report.rows))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Row) -> Iterator[str]:
    for name, value in asdict(row).items():
        mark = f' class="{escape(value)}"' if name == "verdict" and value else ""
        yield f"<td{mark}>{escape(_shown(name, value, row))}</td>"


def _shown(name: str, value: object, row: Row) -> str:
    return "-" if name == "k" and not row.has_draft_length else shown(value)


def shown(value: object) -> str:
    """A figure in a table."""
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        return " ".join(f"{item:.2f}" if isinstance(item, float) else str(item) for item in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def words(meanings: Mapping[str, str]) -> str:
    """What each word means."""
    return f"<dl>{''.join(f'<dt>{escape(word)}</dt><dd>{escape(text)}</dd>' for word, text in meanings.items())}</dl>"
