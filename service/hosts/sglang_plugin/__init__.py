"""What runs inside SGLang's scheduler: an observer of its verification, and a loader of drafters from files.

Not run live: SGLang's kernels for the CPU are not on PyPI. Every name of SGLang's that is used here is held against
its wheel by `make test-contracts`. The entry point `sglang.srt.plugins` calls `register` in each of its processes.
"""

import importlib

PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
VERIFIED = f"{PROCESSOR}._resolve_spec_v2_tokens"
SETTLED = f"{PROCESSOR}._handle_finish_state_updated_req"


def register() -> None:
    """Hang the observer on SGLang's own hooks. What it needs of redraft is imported at its first round."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(VERIFIED, _verified, hooks.HookType.AFTER)
    hooks.HookRegistry.register(SETTLED, _settled, hooks.HookType.AFTER)


def _verified(tokens: object, processor: object, result: object, batch: object) -> None:
    from service.hosts.sglang_plugin.observer import observer

    observer().verified(batch, result)


def _settled(nothing: object, processor: object, req: object, *rest: object) -> None:
    from service.hosts.sglang_plugin.observer import observer

    observer().settled(req)
