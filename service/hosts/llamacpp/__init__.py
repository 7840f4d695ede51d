"""llama.cpp as a host. Its server cannot take another drafter while it runs, so a second one is started beside it.

`blue_green` is the `Swapper`; `process` is one llama-server; `wheel` starts the server of the `xllamacpp` wheel, for
machines without a compiled one.
"""

from service.hosts.llamacpp.blue_green import BlueGreen, LlamaCppConfig

__all__ = ["BlueGreen", "LlamaCppConfig"]
