"""`redraft compare`: two versions side by side: lineage, training, the gate's figures, live traffic, weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.acceptance import NOTHING
from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import figure, number_or_dash, show_json, table
from cli.show import Card, card_json, version_card

if TYPE_CHECKING:
    from storage.weights import WeightsStore

Line = tuple[str, str, str]


def compare(
    a: Annotated[int, typer.Argument(help="number of a version")],
    b: Annotated[int, typer.Argument(help="number of another")],
    drafter: DrafterOption = "",
    json: JsonOption = False,
) -> None:
    """Show two versions side by side."""
    opened = open_drafter(drafter)
    cards = version_card(opened, a), version_card(opened, b)
    changes = weight_changes(_store(opened), cards[0], cards[1])
    if json:
        show_json({"a": card_json(cards[0]), "b": card_json(cards[1]), "weights": changes})
        return
    lines = [*_lineage(cards), *_training(cards), *_gate(cards), *_traffic(cards)]
    if changes:
        whole = changes[0]
        lines.append(("weights", "", f"changed by {whole['relative']:.4f} (norm of the difference over that of {a})"))
    table(f"versions {a} and {b} of {opened.drafter.name}", ("", str(a), str(b)), lines)


def _store(opened: Opened) -> "WeightsStore":
    from storage.weights import WeightsStore

    return WeightsStore(opened.config.weights_folder)


def _lineage(cards: Sequence[Card]) -> list[Line]:
    return [
        _line("state", [card.summary.state for card in cards]),
        _line("reason", [card.summary.reason for card in cards]),
        _line("parent", [number_or_dash(card.summary.version.parent) for card in cards]),
        _line("made (UTC)", [f"{card.summary.version.created_at:%F %T}" for card in cards]),
        _line("window", [number_or_dash(card.summary.version.window_id) for card in cards]),
    ]


def _training(cards: Sequence[Card]) -> list[Line]:
    """Size and loss of the runs, and of their settings those that differ."""
    runs = [card.training for card in cards]
    if not any(runs):
        return []
    lines = [
        _line("records", [str(run.records) if run else "-" for run in runs]),
        _line("positions", [str(run.positions) if run else "-" for run in runs]),
        _line("last loss", [figure(run.last_loss) if run else "-" for run in runs]),
    ]
    configs = [run.config if run else {} for run in runs]
    for name in sorted(configs[0].keys() | configs[1].keys()):
        values = [str(config.get(name, "-")) for config in configs]
        if values[0] != values[1]:
            lines.append(_line(name, values))
    return lines


def _gate(cards: Sequence[Card]) -> list[Line]:
    """Each version's own evaluation against its parent; the holdouts may differ."""
    overall = [card.summary.evaluation.overall if card.summary.evaluation else None for card in cards]
    if not any(overall):
        return []
    return [
        _line("acceptance probability (holdout)", [figure(s.candidate_probability) if s else "-" for s in overall]),
        _line(
            "gain on the parent",
            [f"{s.gain:+.3f} [{s.gain_low:+.3f}, {s.gain_high:+.3f}]" if s else "-" for s in overall],
        ),
    ]


def _traffic(cards: Sequence[Card]) -> list[Line]:
    """Live traffic by workload and policy."""
    lines = []
    for workload, policy in sorted(cards[0].acceptance.keys() | cards[1].acceptance.keys()):
        found = [card.acceptance.get((workload, policy), NOTHING) for card in cards]
        label = f"{workload}, {policy}"
        lines += [
            _line(f"{label}: requests", [str(f.requests) for f in found]),
            _line(f"{label}: acceptance rate", [_with_k(f.acceptance_rate, 3, f.k) for f in found]),
            _line(f"{label}: acceptance length", [_with_k(f.acceptance_length, 2, f.k) for f in found]),
        ]
    return lines


def _with_k(value: float | None, digits: int, k: int | None) -> str:
    return "-" if value is None else f"{figure(value, digits)} (k={k})"


def _line(name: str, values: Sequence[str]) -> Line:
    return name, values[0], values[1]


def weight_changes(store: "WeightsStore", a: Card, b: Card) -> list[dict[str, Any]]:
    """How far the weights moved from `a` to `b`: the whole first, then each tensor.

    `relative` is the norm of the difference over the norm in `a`. Empty where a file is gone or the tensors
    are not the same ones; a damaged file raises `BlobDamaged`.
    """
    import numpy as np
    from safetensors.numpy import load

    digests = [card.summary.version.weights_sha256 for card in (a, b)]
    if not all(store.has(digest) for digest in digests):
        return []
    before, after = (load(store.get(digest)) for digest in digests)
    names = sorted(name for name in before if before[name].dtype.kind == "f")
    if {name: t.shape for name, t in before.items()} != {name: t.shape for name, t in after.items()}:
        return []
    moved = [float(np.linalg.norm(after[name] - before[name])) for name in names]
    norms = [float(np.linalg.norm(before[name])) for name in names]
    whole = {"tensor": "", "relative": _ratio(float(np.linalg.norm(moved)), float(np.linalg.norm(norms)))}
    return [whole, *({"tensor": n, "relative": _ratio(m, w)} for n, m, w in zip(names, moved, norms, strict=True))]


def _ratio(moved: float, norm: float) -> float:
    return moved / norm if norm else moved
