"""Weights pushed into a running vLLM from outside, for drafters that vLLM runs itself (`draft_model`, EAGLE).

Nothing here imports vLLM: it is spoken to over HTTP (`control`), and what runs inside it is service/hosts/vllm_plugin.
"""

from service.hosts.vllm_push.push import VllmPush, VllmPushConfig

__all__ = ["VllmPush", "VllmPushConfig"]
