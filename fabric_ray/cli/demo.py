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
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer
from rich.console import Console

from fabric_ray.cli.console import stdout
from fabric_ray.cli.ending import Code, Commands, ended_by_sigterm, errors_in_words, fail
from fabric_ray.cli.options import Json
from fabric_ray.cli.progress import working
from fabric_ray.demo import options
from fabric_ray.extras import how_to_install

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""The main jobs, for real, on this machine: neither a GPU nor a NIC for RDMA is needed.

    \b
    Examples:
      fabric-ray demo weights            # trainers push weights into rollouts
      fabric-ray demo kvcache            # prefill and decode apart, behind Ray Serve
      fabric-ray demo moe                # experts on many ranks, one of which dies
      fabric-ray demo weights --help     # what each can be asked for

    All exit with 0 if everything that they verified held, with 1 if something didn't, and with 2 if
    they can't run: a missing package, no cluster, sizes that don't fit.
    """,
)

Demo = Callable[[Any, bool], None]


def _command(fields: type[msgspec.Struct], short_help: str) -> Callable[[Demo], Demo]:
    """Makes a command of a function: its options are the fields of the struct, and ``--json``."""

    def register(run: Demo) -> Demo:
        def command(as_json: bool, **given: Any) -> None:
            values = {n: v.value if isinstance(v, Enum) else v for n, v in given.items()}
            run(fields(**values), as_json)

        hints = get_type_hints(fields, include_extras=True)
        parameters = [
            Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
            )
            for field in msgspec.structs.fields(fields)
            if (annotation := _option(field.name, hints[field.name])) is not None
        ]
        json_ = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        command.__signature__ = Signature([*parameters, json_])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*parameters, json_)}
        app.command(run.__name__, short_help=short_help, help=run.__doc__)(command)
        return run

    return register


def _option(name: str, hint: Any) -> Any:
    """The annotation of a parameter; ``None`` for a field without a text."""
    if get_origin(hint) is not Annotated:
        return None
    kind, *_, text = get_args(hint)
    if get_origin(kind) is Literal:
        choices: Any = Enum
        kind = choices(name, {each: each for each in get_args(kind)})
    return Annotated[kind, typer.Option(options.option(name), help=text)]


@_command(options.Weights, "Weights from trainers into rollouts.")
def weights(asked: options.Weights, as_json: bool) -> None:
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
    _run("weights", asked, as_json, working("start"))


@_command(options.KvCache, "Prefill and decode apart, behind Ray Serve.")
def kvcache(asked: options.KvCache, as_json: bool) -> None:
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
    console = _console(as_json)

    def tell(kind: str, text: str) -> None:
        if kind == "piece":
            console.out(ascii(text)[1:-1], end="", highlight=False)
        else:
            console.print(f"{'' if kind == 'event' else '[bold]'}{text}", highlight=False)

    _run("kvcache", asked, as_json, nullcontext(tell))


@_command(options.Moe, "Experts on many ranks, one of which dies.")
def moe(asked: options.Moe, as_json: bool) -> None:
    """A model with experts runs expert-parallel, loses a rank to kill -9, goes on without its
    experts, and takes a new rank in.

    Verified: every logit, bit by bit, against the model in one place.

    \b
    Examples:
      fabric-ray demo moe
      fabric-ray demo moe --ranks 8 --tokens 64
      fabric-ray demo moe --steps 1 --json | jq .verified
    """
    _run("moe", asked, as_json)


def _run(
    demo: str,
    asked: Any,
    as_json: bool,
    telling: AbstractContextManager[Callable[..., None]] | None = None,
) -> None:
    """Runs a demo, and prints what it found; the exit code says whether all checks held.

    Args:
        demo: the module.
        asked: its options.
        as_json: whether stdout holds one object alone.
        telling: yields what shows progress; lines by default.
    """
    _prepare(demo)
    module = import_module(f"fabric_ray.demo.{demo}")
    console = _console(as_json)
    lines = nullcontext(partial(console.print, highlight=False, markup=False))
    # Ray says on stdout that a worker was killed, where the result alone belongs.
    quiet: AbstractContextManager[Any] = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with ended_by_sigterm(), errors_in_words(), quiet, telling or lines as tell:
        outcome = module.run(asked, tell)
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
