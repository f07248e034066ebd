"""An engine of the user's own, which a deployment's file names, behind prefillers and decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("ray")

from fabric_ray.errors import InvalidArgument
from fabric_ray.serve import ServeArgs, build_app
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.messages import Failed, Finished, Generate
from tests.integration.own_engine import STOP, expected, make
from tests.ray.serve_world import FABRIC, prompts, world

ENGINE = "tests.integration.own_engine:make"
FILE = f"""
model: sums
engine: {ENGINE}
prefill: {{chunk_tokens: 16, cache: {{page_tokens: 8}}}}
decode: {{cache: {{page_tokens: 32}}}}
"""


def from_file(folder: Path) -> dict[str, Any]:
    """The arguments as a user writes them."""
    path = folder / "serve.yaml"
    path.write_text(FILE)
    return ServeArgs.from_file(path).model_dump(exclude_unset=True)


async def test_its_tokens_are_those_that_its_pages_say(tmp_path: Path) -> None:
    asked = prompts(6, seed=1)
    async with world(**from_file(tmp_path)) as w:
        for number, prompt in enumerate(asked):
            end = await w.ask(Generate(f"r{number}", prompt, 12))
            assert isinstance(end, Finished)
            assert list(end.tokens) == expected(prompt, 12)
        await w.idle()


async def test_an_end_may_be_ignored_or_put_off(tmp_path: Path) -> None:
    prompt = (200, 57)  # whose sum is the stop token

    async def ended(**fields: Any) -> Finished:
        end = await w.ask(Generate("r", prompt, 8, **fields))
        assert isinstance(end, Finished)
        return end

    async with world(**from_file(tmp_path)) as w:
        end = await ended()
        assert (end.tokens, end.reason) == ((STOP,), "stop")
        end = await ended(ignore_eos=True)
        assert (list(end.tokens), end.reason) == (expected(prompt, 8, stop=None), "length")
        # The likeliest of the others, until the stop token may be chosen.
        end = await ended(min_tokens=3)
        assert (end.tokens, end.reason) == ((0, 0, 0, STOP), "stop")
        await w.idle()


async def test_a_stop_text_may_be_put_off(tmp_path: Path) -> None:
    async with world(**from_file(tmp_path)) as w:
        for min_tokens, tokens in ((0, 1), (1, 8)):
            asked = Generate("r", (ord("A"),), 8, stop=("A",), min_tokens=min_tokens)
            end = await w.ask(asked)
            assert isinstance(end, Finished)
            assert len(end.tokens) == tokens
            assert end.text.startswith("A") == bool(min_tokens)


async def test_a_token_that_it_lacks_is_refused(tmp_path: Path) -> None:
    async with world(**from_file(tmp_path)) as w:
        end = await w.ask(Generate("r", (1, 258), 4))
        assert isinstance(end, Failed)
        assert end.error().status == 400


def test_an_application_takes_it_whatever_its_model_is_called(tmp_path: Path) -> None:
    build_app(ServeArgs.model_validate(from_file(tmp_path)))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("no_such_module:make", "no_such_module"),
        ("tests.integration.own_engine:missing", "missing"),
        ("tests.integration.own_engine:VOCAB", "int"),
    ],
)
def test_one_that_cannot_be_made_is_refused_before_anything_starts(engine: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        build_app(ServeArgs(engine=engine))


@pytest.mark.parametrize("engine", ["make", "a:b:c", "a/b.py:make", ":make", "a:"])
def test_a_name_that_is_no_module_and_factory_is_refused(engine: str) -> None:
    with pytest.raises(ValidationError):
        ServeArgs(engine=engine)


def lacking(args: ServeArgs, **asked: Any) -> object:
    class Half:
        fingerprint, ranks, layout, buffers, tail = "", 1, None, None, None
        read_tail = write_tail = prefill = None

    return Half()


def other_memory(args: ServeArgs, **asked: Any) -> object:
    engine = make(args, **asked)
    asked["allocate"](0, 64)
    return engine


def test_one_that_does_not_fit_says_what_it_lacks() -> None:
    def instance(factory: str, **fields: Any) -> None:
        given = {"engine": f"{__name__}:{factory}", "fabric": FABRIC, **fields}
        Instance(ServeArgs.model_validate(given), "decode", name="d").close()

    with pytest.raises(InvalidArgument, match=r"\bdecode\b"):
        instance("lacking")
    with pytest.raises(InvalidArgument, match=r"decode\.tp"):
        instance("make", decode={"tp": 2})
    with pytest.raises(InvalidArgument, match=r"\[64\]"):
        instance("other_memory")
