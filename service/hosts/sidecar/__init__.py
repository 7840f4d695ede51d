"""The sidecar: an OpenAI-compatible reverse proxy before an engine that nobody has to change.

A request's way: headers -> asking (is it observed, and what is the engine asked for besides) -> the engine -> stripping
(what the client did not ask for goes) -> the client; and behind the client's back reading -> rounds -> recording -> the
feedback writer. Whatever fails here but the engine itself, the client's request passes.
"""
