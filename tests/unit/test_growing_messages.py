"""Messages of a later release, which have more fields, are understood by this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fabric_ray.compat.nixl.exchange import MetadataRequest
from fabric_ray.compat.nixl.metadata import Metadata
from fabric_ray.compat.sessions import _Question as SessionsQuestion
from fabric_ray.compat.sessions import _Table as SessionsTable
from fabric_ray.integrations.bucket_header import BucketHeader, Invitation
from fabric_ray.integrations.vllm_kv_plan import Claim
from fabric_ray.observe.client import AskRecords
from fabric_ray.observe.process import ProcessMetrics, ProcessRecords
from fabric_ray.runtime.rdt.offer import Offer
from fabric_ray.serve.messages import Finished, Generate, Prompt

PACKAGE = Path(__file__).parents[2] / "fabric_ray"
MESSAGES = [
    AskRecords,
    Claim,
    Finished,
    Generate,
    Invitation,
    BucketHeader,
    Metadata,
    MetadataRequest,
    Offer,
    ProcessMetrics,
    ProcessRecords,
    Prompt,
    SessionsQuestion,
    SessionsTable,
]
READERS: dict[type, Callable[[bytes], Any]] = {
    Claim: Claim.decoded,
    Invitation: Invitation.from_bytes,
}
ADDED = "of a later release"


def sample(of: msgspec.inspect.Type) -> Any:
    """A value of a type, with something in every list."""
    info = msgspec.inspect
    match of:
        case info.StructType():
            return of.cls(**{f.name: sample(f.type) for f in of.fields})
        case info.UnionType():
            return sample(of.types[0])
        case info.ListType() | info.VarTupleType():
            kind = list if isinstance(of, info.ListType) else tuple
            return kind([sample(of.item_type)])
        case info.TupleType():
            return tuple(sample(item) for item in of.item_types)
        case info.DictType():
            return {sample(of.key_type): sample(of.value_type)}
        case info.LiteralType():
            return of.values[0]
        case info.EnumType():
            return next(iter(of.cls))
        case info.BoolType():
            return True
        case info.IntType():
            return 1
        case info.FloatType():
            return 0.5
        case info.StrType() | info.AnyType():
            return "x"
        case info.BytesType():
            return b"x"
        case info.NoneType():
            return None
    raise TypeError(f"no sample of {of}; add one here")


def grown(value: Any) -> Any:
    """The value as it is written, with one more field in every structure."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            plain = [grown(getattr(value, name)) for name in value.__struct_fields__]
            if config.array_like:
                return [*plain, ADDED]
            named = dict(zip(value.__struct_encode_fields__, plain, strict=True))
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return {"added": ADDED, **tag, **named}
        case list() | tuple():
            return [grown(item) for item in value]
        case dict():
            return {key: grown(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_a_message_with_more_fields_is_the_same_message(message: type) -> None:
    value = sample(msgspec.inspect.type_info(message))
    later = msgspec.msgpack.encode(grown(value))
    assert later != msgspec.msgpack.encode(value)
    read = READERS.get(message, lambda data: msgspec.msgpack.decode(data, type=message))
    assert read(later) == value


def test_no_message_forbids_what_it_does_not_know() -> None:
    named = [p for p in PACKAGE.rglob("*.py") if "forbid_unknown_fields" in p.read_text()]
    assert not named


def test_an_offer_of_tensors_with_more_fields_is_taken() -> None:
    offer = sample(msgspec.inspect.type_info(Offer))
    offer = msgspec.structs.replace(
        offer, version=1, extents=(msgspec.structs.replace(offer.extents[0], region=0),)
    )
    assert Offer.from_bytes(msgspec.msgpack.encode(grown(offer))) == offer
