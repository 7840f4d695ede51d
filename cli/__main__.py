"""`python -m cli`: the `redraft` command without an installed script."""

from cli.main import app

app(prog_name="redraft")
