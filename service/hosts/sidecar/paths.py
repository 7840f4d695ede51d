"""Which of an engine's paths the sidecar passes on.

All of them, unless they can be misused. Engines' control routes carry no key: where the sidecar itself steers the
engine by them (`--swap`), only paths that are known to be a client's are passed on; where others than this machine can
reach the sidecar, all but those that are known to steer the engine.
"""

from typing import Final

from service.hosts.sidecar.dialects import Dialect

CLIENTS: Final = (
    "/v1", "/v2", "/health", "/health_generate", "/ping", "/version", "/tokenize", "/detokenize", "/apply-template",
    "/metrics", "/load", "/models", "/model_info", "/get_model_info", "/generate", "/completion", "/completions",
    "/chat/completions", "/infill", "/embedding", "/embeddings", "/pooling", "/classify", "/score", "/rerank",
    "/reranking", "/invocations", "/inference", "/encode", "/api",
)  # fmt: skip


def passes(path: str, dialect: Dialect | None, steered: bool, reachable: bool) -> bool:
    """`path` without dots and double slashes; `reachable`: from other machines."""
    steers = dialect is not None and _within(path, dialect.control)
    if steered:
        return not steers and (path == "/" or _within(path, CLIENTS))
    return not (steers and reachable)


def _within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)
