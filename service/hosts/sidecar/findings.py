"""What the probe found an engine to be and to tell: frozen, and replaced as a whole when it is asked again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.hosts.sidecar.dialects import DIALECTS, Dialect, Form
from service.hosts.sidecar.stripping import Bare


@dataclass(frozen=True)
class Plan:
    """How requests of one form are observed."""

    bare: Bare
    top_k: int  # target probabilities that the engine gives; 0: none
    token_ids: bool
    steps: bool  # each round's counts
    totals: bool  # sums of a request


@dataclass(frozen=True)
class Findings:
    """One engine, as it answered."""

    dialect: Dialect
    version: str
    model: str
    root: str = ""  # where the engine has the model from: a folder, or a name
    plans: Mapping[Form, Plan] = field(default_factory=dict)  # forms that are observed
    missing: tuple[str, ...] = ()  # what is not there, and what to do about it: sentences

    @staticmethod
    def none() -> "Findings":
        """Of an engine that has not answered."""
        return Findings(DIALECTS["unknown"], "", "")

    @property
    def engine(self) -> str:
        return f"{self.dialect.engine} {self.version}".strip()
