"""``fabric-ray demo``: the main jobs, for real, on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fabric_ray.cli.console import stdout
from fabric_ray.cli.ending import Code, Commands, errors_in_words, fail
from fabric_ray.cli.progress import working
from fabric_ray.extras import how_to_install

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""The main jobs, for real, on this machine: neither a GPU nor a NIC for RDMA is needed.

    \b
    Examples:
      fabric-ray demo weights            # trainers push weights into rollouts
      fabric-ray demo rl                 # a loop that learns while it pushes
      fabric-ray demo kvcache            # prefill and decode apart, behind Ray Serve
      fabric-ray demo moe                # experts on many ranks, one of which dies
      fabric-ray demo weights --help     # what each can be asked for

    All exit with 0 if everything that they verified held, with 1 if something didn't, and with 2 if
    they can't run: a missing package, no cluster, sizes that don't fit.
    """,
)


class Transport(str, Enum):
    auto = "auto"
    shm = "shm"
    tcp = "tcp"


class Kind(str, Enum):
    llama = "llama"
    qwen2 = "qwen2"
    qwen2_moe = "qwen2_moe"
    qwen3 = "qwen3"
    qwen3_moe = "qwen3_moe"


# What all demos have.
Trainers = Annotated[int, typer.Option(help="FSDP2 trainers.")]
Carrier = Annotated[Transport, typer.Option(help="What moves the bytes.")]
Output = Annotated[Path, typer.Option(help="Where the timeline goes.")]
Address = Annotated[
    str | None,
    typer.Option(help="Of a running Ray cluster. Default: RAY_ADDRESS, or Ray is started here."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(short_help="Weights from trainers into rollouts.")
def weights(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a Hugging Face checkpoint (safetensors). Default: a model is made."
        ),
    ] = None,
    trainers: Trainers = 2,
    rollouts: Annotated[int, typer.Option(help="Rollouts: the tensor-parallel size.")] = 2,
    ep: Annotated[int, typer.Option(help="Groups of rollouts that own whole experts (MoE).")] = 1,
    transport: Carrier = Transport.auto,
    kind: Annotated[Kind, typer.Option(help="Kind of the model that is made.")] = Kind.llama,
    parameters: Annotated[float, typer.Option(help="Size of the model that is made.")] = 300e6,
    pushes: Annotated[int, typer.Option(help="Versions to push.")] = 4,
    steps: Annotated[int, typer.Option(help="Training steps before each push.")] = 1,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Rollouts hold one copy, overwritten by a push.")
    ] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Have every push compare digests on both sides.")
    ] = False,
    output: Output = Path("demo-output"),
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Trainers push the weights of a model, while they train it, into tensor-parallel rollouts.

    Every byte on every rollout is compared with a reference that torch puts together.

    \b
    Examples:
      fabric-ray demo weights                                # half a minute on a laptop
      fabric-ray demo weights --parameters 5e6 --pushes 2    # a few seconds
      fabric-ray demo weights --kind qwen3_moe --ep 2
      fabric-ray demo weights --checkpoint DIR --trainers 4 --rollouts 2
      fabric-ray demo weights --address auto --transport tcp # on your cluster
      fabric-ray demo weights --json | jq .verified
    """
    _run("weights", locals(), working("start"), staged=not in_place)


@app.command(short_help="A loop that learns while it pushes.")
def rl(
    steps: Annotated[int, typer.Option(help="Updates; each is pushed as a version.")] = 120,
    staleness: Annotated[
        int, typer.Option(help="Versions that a sample may be behind the trainers.")
    ] = 1,
    trainers: Trainers = 2,
    rollouts: Annotated[int, typer.Option(help="Rollouts: engines of their own.")] = 2,
    transport: Carrier = Transport.auto,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and samples.")] = 0,
    output: Output = Path("demo-output"),
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """A small transformer learns to sort digits by asynchronous reinforcement learning.

    Rollouts generate while trainers learn and push. Verified: every version's bits on every
    rollout, every sample's log-probabilities, its staleness, and that the reward rose.

    \b
    Examples:
      fabric-ray demo rl                       # a minute; the reward rises from 0 to nearly 1
      fabric-ray demo rl --staleness 0         # rollouts wait for every version
      fabric-ray demo rl --steps 20 --json | jq .verified
    """
    _run("rl.loop", locals())


@app.command(short_help="Prefill and decode apart, behind Ray Serve.")
def kvcache(
    model: Annotated[
        str,
        typer.Option(
            help="tiny-llama, tiny-qwen3, tiny-mla, tiny-hybrid..., or a directory of a Hugging "
            "Face checkpoint."
        ),
    ] = "tiny-llama",
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefiller.")] = 2,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decoder.")] = 1,
    clients: Annotated[int, typer.Option(help="Clients, each with one request at a time.")] = 6,
    seconds: Annotated[float, typer.Option(help="Of load, without what scaling takes.")] = 12.0,
    max_tokens: Annotated[int, typer.Option(help="Of each completion.")] = 24,
    transport: Carrier = Transport.auto,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Ray Serve streams a completion through a prefiller and a decoder, then scales while requests
    flow, and a prefiller is killed.

    Verified: every token is that of one engine that does both halves, every request ends, and no
    page stays taken.

    \b
    Examples:
      fabric-ray demo kvcache
      fabric-ray demo kvcache --model tiny-mla --prefill-tp 1
      fabric-ray demo kvcache --prefill-tp 4 --decode-tp 2 --clients 12
      fabric-ray demo kvcache --seconds 5 --json | jq .verified
    """
    given = locals()
    console = _console(as_json)

    def tell(kind: str, text: str) -> None:
        if kind == "piece":
            console.out(ascii(text)[1:-1], end="", highlight=False)
        else:
            console.print(f"{'' if kind == 'event' else '[bold]'}{text}", highlight=False)

    _run("kvcache", given, nullcontext(tell))


@app.command(short_help="Experts on many ranks, one of which dies.")
def moe(
    ranks: Annotated[int, typer.Option(help="Actors that the experts are divided among.")] = 4,
    tokens: Annotated[int, typer.Option(help="That each rank reads in a step.")] = 32,
    steps: Annotated[int, typer.Option(help="Of each of the three phases.")] = 3,
    transport: Carrier = Transport.auto,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """A model with experts runs expert-parallel, loses a rank to kill -9, goes on without its
    experts, and takes a new rank in.

    Verified: every logit and every token, bit by bit, against the model in one place.

    \b
    Examples:
      fabric-ray demo moe
      fabric-ray demo moe --ranks 8 --tokens 64
      fabric-ray demo moe --steps 1 --json | jq .verified
    """
    _run("moe", locals())


def _run(
    demo: str,
    given: dict[str, Any],
    telling: AbstractContextManager[Callable[..., None]] | None = None,
    **more: Any,
) -> None:
    """Runs a demo, and prints what it found; the exit code says whether all checks held.

    Args:
        demo: the module.
        given: parameters of the command, which are the demo's options by their names.
        telling: yields what shows progress; lines by default.
        more: further options.
    """
    _prepare(demo)
    module = import_module(f"fabric_ray.demo.{demo}")
    named = {name: given[name] for name in module.Options.__struct_fields__ if name in given}
    options = {name: v.value if isinstance(v, Enum) else v for name, v in named.items()}
    as_json: bool = given["as_json"]
    console = _console(as_json)
    lines = nullcontext(partial(console.print, highlight=False, markup=False))
    # Ray says on stdout that a worker was killed, where the result alone belongs.
    quiet: AbstractContextManager[Any] = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with errors_in_words(), quiet, telling or lines as tell:
        outcome = module.run(module.Options(**options, **more), tell)
    if as_json:
        typer.echo(json.dumps(outcome.summary()))
    else:
        outcome.show(console)
    if not outcome.verified:
        raise typer.Exit(Code.NO)


def _console(as_json: bool) -> Console:
    """Progress goes to stderr where stdout holds the result alone."""
    return Console(stderr=True, quiet=not sys.stderr.isatty()) if as_json else stdout()


def _prepare(demo: str) -> None:
    """What a demo needs before it imports Ray."""
    needed = ["ray", "torch", "safetensors", "matplotlib"]
    needed += ["uvicorn"] if demo == "kvcache" else []
    missing = [m for m in needed if find_spec(m) is None]
    if missing:
        extra = "serve" if demo == "kvcache" else "ray"
        fail(f"{', '.join(missing)} not installed; {how_to_install(extra)}")
    # Ray reads it when it is imported, and would print more than the demo does.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A laptop under load needs longer than Ray allows by default.
    os.environ.setdefault("RAY_agent_register_timeout_ms", "180000")
