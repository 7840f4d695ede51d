"""redraft inside vLLM, as its `custom_class` proposer.

vllm serve ... --speculative-config '{"method": "custom_class", "model": "service.hosts.vllm.Proposer",
                                      "num_speculative_tokens": 4}'
"""

from service.hosts.vllm.proposer import Proposer

__all__ = ["Proposer"]
