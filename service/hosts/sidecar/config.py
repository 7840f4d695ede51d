"""The sidecar's settings."""

from dataclasses import dataclass

from storage.config import setting


@dataclass(frozen=True)
class SidecarConfig:
    """How much of an engine's traffic is observed, and how."""

    sidecar_host: str = setting("127.0.0.1", "address that the sidecar listens on; the default is this machine only")
    sidecar_port: int = setting(8766, "port that the sidecar listens on")
    sidecar_share: float = setting(0.1, "share of the requests that a sidecar observes, some in a row; 0: none")
    sidecar_top_k: int = setting(20, "target probabilities that an observed request asks its engine for; 0: none")
    sidecar_temperature: float = setting(
        1.0, "temperature of requests that name none: the engine's own default (vLLM takes the model's)"
    )
    sidecar_body_limit: int = setting(
        8 * 1024 * 1024, "bytes of a request's body; larger ones pass, and are not observed"
    )
    sidecar_queue: int = setting(256, "answers that wait to be read behind the clients' backs; more are not observed")
    sidecar_scrape_seconds: float = setting(5.0, "how often the engine's own counters are read; 0: never")
    sidecar_engine_key: str = setting("", "key of the engine for the sidecar's own questions, where it wants one")

    def __post_init__(self) -> None:
        if not 0 <= self.sidecar_share <= 1:
            raise ValueError(f"REDRAFT_SIDECAR_SHARE={self.sidecar_share}: use 0 to 1")
        if min(self.sidecar_top_k, self.sidecar_body_limit, self.sidecar_queue, self.sidecar_temperature) < 0:
            raise ValueError("REDRAFT_SIDECAR_*: negative values make no sense")
