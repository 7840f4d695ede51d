"""`redraft bench adapt` and `redraft bench grid`: how well and how soon drafters learn from real prompts."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench_input import FileOption, TokensOption, chosen_names, prepare, texts_of
from cli.bench_tables import show_adapt, show_grid
from cli.init import ANSWER_TOKENS, DRAFT_VOCAB, SAMPLE_PROMPTS, Plan, first_drafter, read_prompts
from cli.output import CommandError, as_json, say, write
from cli.settings import settings

if TYPE_CHECKING:
    from torch import Tensor

    from adapter.target import Target
    from benchmarks.adapt import Ours
    from benchmarks.experiment import Experiment, Start, Traffic

LAYERS = 2  # of version 1, as `redraft init` makes it

WorkloadOption = Annotated[
    list[Path],
    typer.Option(
        help='JSON lines, each {"prompt": "..."}, in the order of the shifts; the file gives its name; repeatable'
    ),
]
MoreArgument = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="further workloads")]
RequestsOption = Annotated[int, typer.Option(help="requests of each workload, evenly spread over its file", min=4)]
HeldOutOption = Annotated[int, typer.Option(help="further requests of each workload, never trained on", min=1)]
LengthOption = Annotated[int, typer.Option("--k", help="draft length", min=1)]
WarmOption = Annotated[
    bool, typer.Option(help="version 1 is distilled on the target's answers to sample prompts first")
]
SeedOption = Annotated[int, typer.Option(help="of the order of a workload's requests; -1: as in the file", min=-1)]


def adapt(
    workload: WorkloadOption,
    more: MoreArgument = None,
    requests: RequestsOption = 150,
    held_out: HeldOutOption = 32,
    arms: Annotated[
        str, typer.Option(help="separated by commas; also osd_tuned, and LOSS/POSITIONS for redraft with these")
    ] = "frozen,osd,redraft,offline",
    k: LengthOption = 4,
    max_tokens: TokensOption = 96,
    window: Annotated[int, typer.Option(help="requests of the moving mean", min=1)] = 12,
    warm_start: WarmOption = True,
    seed: SeedOption = 0,
    json: FileOption = None,
    png: Annotated[Path | None, typer.Option(help="file to draw the curves to")] = None,
) -> None:
    """Shift from workload to workload, and hold learning as configured against none, OSD and the offline ceiling.

    The target's answers are made once and kept in the cache folder (REDRAFT_CACHE).
    """
    if png is not None and find_spec("matplotlib") is None:
        raise CommandError("--png needs matplotlib: pip install 'redraft[local]'")
    texts = texts_of([*workload, *(more or [])])
    prepare()
    from benchmarks.adapt import AdaptSettings, measure
    from benchmarks.curve_plot import draw
    from benchmarks.experiment import Traffic
    from benchmarks.learning import check
    from storage.valkey import start_valkey

    names = tuple(dict.fromkeys(part.strip() for part in arms.split(",")))
    check(names)
    traffic = Traffic(requests, held_out, max_tokens, seed if seed >= 0 else None)
    asked = AdaptSettings(traffic, names, k, window, warm_start)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redraft-")))
        redis = stack.enter_context(start_valkey(folder / "v.sock", folder / "valkey"))
        report = measure(_experiment(texts, traffic, warm_start, folder), asked, _ours(), redis.url, say)
    show_adapt(report.rows)
    write(json, as_json(report.as_json()))
    if png is not None:
        draw(report, png)
        say(f"wrote {png}")


def grid(
    workload: WorkloadOption,
    more: MoreArgument = None,
    losses: Annotated[str, typer.Option(help="separated by commas; empty: all")] = "",
    positions: Annotated[str, typer.Option(help="separated by commas; empty: all")] = "",
    requests: RequestsOption = 150,
    held_out: HeldOutOption = 64,
    k: LengthOption = 4,
    max_tokens: TokensOption = 96,
    warm_start: WarmOption = True,
    seed: SeedOption = 0,
    json: FileOption = None,
) -> None:
    """Every loss on every choice of positions: one update from version 1 by the same traffic, for each workload."""
    texts = texts_of([*workload, *(more or [])])
    prepare()
    from typing import get_args

    from adapter.batch import Positions
    from adapter.distil import DistilConfig
    from adapter.loss import LOSSES
    from benchmarks.experiment import Traffic
    from benchmarks.grid import GridSettings, measure

    chosen = (
        chosen_names("--losses", losses, tuple(LOSSES)),
        chosen_names("--positions", positions, get_args(Positions)),
    )
    traffic = Traffic(requests, held_out, max_tokens, seed if seed >= 0 else None)
    asked = GridSettings(traffic, *chosen, k, warm_start)
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        experiment = _experiment(texts, traffic, warm_start, Path(folder))
        report = measure(experiment, asked, settings(DistilConfig), say)
    show_grid(report)
    write(json, as_json(report.as_json()))


def _experiment(texts: dict[str, list[str]], traffic: "Traffic", warm_start: bool, folder: Path) -> "Experiment":
    """The target, and its answers and version 1, kept or made now; `folder` is for this run alone."""
    from adapter.target import TargetConfig, load, load_embedding
    from benchmarks.experiment import prepare as prepared

    config = settings(TargetConfig)
    target = load(config)
    embedding = load_embedding(target.files).to(target.device)
    start, cache = _start(target, embedding, warm_start), config.cache.expanduser() / "bench"
    return prepared(target, embedding, texts, traffic, start, cache, folder, say)


def _start(target: "Target", embedding: "Tensor", warm_start: bool) -> "Start":
    """Version 1 as `redraft init` makes it by default, warmed up or not."""
    from adapter.distil import DistilConfig
    from benchmarks.experiment import Start

    plan = Plan("bench", LAYERS, None, None, SAMPLE_PROMPTS, warm_start)
    key: list[Any] = [LAYERS, DRAFT_VOCAB, ANSWER_TOKENS, sha256(SAMPLE_PROMPTS.read_bytes()).hexdigest()]
    key.append(asdict(settings(DistilConfig)) if warm_start else None)
    return Start(lambda: first_drafter(plan, target, embedding, read_prompts(plan.prompts)), key)


def _ours() -> "Ours":
    """redraft's own settings of learning, from the environment."""
    from adapter.distil import DistilConfig
    from adapter.drift import DriftConfig
    from adapter.gate import GateConfig
    from benchmarks.adapt import Ours
    from worker.config import TriggerConfig
    from worker.pipeline import AdaptConfig

    adapt = AdaptConfig(settings(TriggerConfig), settings(DistilConfig), settings(GateConfig))
    return Ours(adapt, settings(DriftConfig))
