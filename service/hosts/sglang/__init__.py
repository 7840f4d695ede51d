"""Weights pushed into a running SGLang. What runs inside it is service/hosts/sglang_plugin."""

from service.hosts.sglang.push import SglangPush, SglangPushConfig

__all__ = ["SglangPush", "SglangPushConfig"]
