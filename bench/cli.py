"""`tandem bench`: measure a server, or compare several."""

from collections.abc import Callable

import typer

from bench.compare import main as compare
from bench.figures import figures
from bench.five.command import five
from bench.goodput import main as goodput
from bench.gpu.command import gpu
from bench.kills import main as kills
from bench.peers.setup import main as setup
from bench.placement import main as placement
from bench.quantize.command import quantize
from bench.regret.command import regret
from bench.serve.command import serve
from bench.shapes.write import main as shapes
from bench.simulate import main as simulate
from bench.soak import main as soak
from bench.speculate.command import speculate
from bench.transfer.command import transfer
from deploy.commands import HomeCommand

app = typer.Typer(help="Measure servers that speak the OpenAI API.", no_args_is_help=True)

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "compare": compare,
    "goodput": goodput,
    "simulate": simulate,
    "regret": regret,
    "speculate": speculate,
    "five": five,
    "quantize": quantize,
    "transfer": transfer,
    "placement": placement,
    "gpu": gpu,
    "kills": kills,
    "soak": soak,
    "figures": figures,
    "setup": setup,
    "shapes": shapes,
}
FORWARDING = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`kills` and `soak` pass further options on to `tandem serve`."""

for name, command in COMMANDS.items():
    settings = FORWARDING if name in ("kills", "soak") else None
    app.command(name, cls=HomeCommand, context_settings=settings)(command)
