"""The `redraft` command: the composition root."""
