"""The `redraft` command: gathers the command files. Nothing heavy is imported before a command asks for it."""

import typer
from typer.core import TyperGroup

from cli import (
    bench,
    compare,
    doctor,
    drift,
    export,
    governor,
    history,
    hosts,
    init,
    operate,
    pin,
    processes,
    purge,
    reproduce,
    route,
    serve,
    show,
    sidecar,
    up,
    versions,
    watch,
)
from cli.demo import command as demo
from cli.output import explain, fail, known


class Commands(TyperGroup):
    """Known errors end a command with one line on stderr and exit code 1; bugs keep their traceback."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not known(error):
                raise
            fail(explain(error))
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    name="redraft",
    help="Keeps a speculative decoder's drafter in step with live traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command, panel in (
    (up.up, "Run"),
    (demo.demo, "Run"),
    (processes.migrate, "Run"),
    (serve.serve, "Run"),
    (sidecar.sidecar, "Run"),
    (processes.trainer, "Run"),
    (processes.housekeeper, "Run"),
    (processes.beat, "Run"),
    (init.init, "Versions"),
    (versions.versions, "Versions"),
    (show.show, "Versions"),
    (compare.compare, "Versions"),
    (history.history, "Versions"),
    (operate.promote, "Versions"),
    (operate.rollback, "Versions"),
    (pin.pin, "Versions"),
    (export.export, "Versions"),
    (reproduce.reproduce, "Versions"),
    (purge.purge, "Versions"),
    (watch.watch, "Versions"),
    (route.route, "Versions"),
    (operate.servers, "Health"),
    (hosts.hosts, "Health"),
    (governor.governor, "Health"),
    (drift.drift, "Health"),
    (doctor.doctor, "Health"),
    (processes.alive, "Health"),
):
    app.command(rich_help_panel=panel)(command)
app.add_typer(bench.app, rich_help_panel="Run")
app.command(hidden=True)(processes.valkey)
