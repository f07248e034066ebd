"""Modules as trainers hold them: wrapped, adapted, tied, with stacked experts or draft layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Container, DType, ExtraTensors, Leaf, Mesh, MissingTensors, Side, Tensor
from fabric_ray.plan import Replicate as Whole
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.families import target_side
from fabric_ray.weights.quant import Cast, linear_formats, quantised_target
from fabric_ray.weights.reference import expected_containers
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource
from fabric_ray.weights.source_tensors import SourceTensors
from fabric_ray.weights.step_sender import StepSender
from tests.unit.families.pushes import assert_same, noise
from tests.unit.models.small_models import SMALL
from tests.unit.plan.fake_group import as_rank
from tests.unit.weights.local_sync import InProcess

Tensors = Mapping[str, torch.Tensor]


def whole_side(tensors: Tensors) -> Side:
    """One rollout that needs these tensors, whole."""
    containers = []
    for name, tensor in tensors.items():
        dtype = DType.of(str(tensor.dtype).removeprefix("torch."))
        leaf = Leaf(Tensor(name, tuple(tensor.shape), dtype), Mesh.line([0]), (Whole(),))
        containers.append(Container(name, dtype, leaf))
    return Side.of(1, containers)


class Pushes:
    def __init__(self, open_engine: Callable[..., TransferEngine]) -> None:
        self._open = open_engine
        self._parts: list[Any] = []
        self.sources: list[Any] = []
        self.targets: list[WeightTarget] = []

    def sync(
        self, held: list[Any], side: Side, source: Callable[..., Any] = WeightSource, **options: Any
    ) -> WeightSync:
        trainers = [f"trainer {rank}" for rank in range(len(held))]
        rollouts = [f"rollout {rank}" for rank in side.ranks]
        engines = {who: self._open(who, transport="shm") for who in (*trainers, *rollouts)}
        for rank, who in enumerate(trainers):
            self.sources.append(source(held[rank], rank=rank, name=who, engine=engines[who]))
        self.targets = [
            WeightTarget(side, rank=rank, name=who, engine=engines[who])
            for rank, who in enumerate(rollouts)
        ]
        self._parts += [*self.sources, *self.targets]
        options = {"digest": True, "timeout": 5.0, **options}
        return WeightSync(trainers, rollouts, calls=InProcess(), **options)

    def close(self) -> None:
        for part in self._parts:
            part.close()


@pytest.fixture
def pushes(open_engine: Callable[..., TransferEngine]) -> Iterator[Pushes]:
    made = Pushes(open_engine)
    yield made
    made.close()


class Tied(torch.nn.Module):
    """An embedding, a layer, and a head that is the embedding or not."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(6, 4), "q_proj": torch.nn.Linear(4, 5, bias=False)}
        )
        self.lm_head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight


UNTIED = {name: t.clone() for name, t in Tied(tied=False).state_dict().items()}
TIED = {name: tensor for name, tensor in UNTIED.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        lambda model: torch.compile(checkpoint_wrapper(torch.compile(model))),
        lambda model: {f"module._orig_mod.{n}": t for n, t in model.state_dict().items()},
        lambda model: {
            f"_fsdp_wrapped_module.{n.replace('model.', 'model._checkpoint_wrapped_module.')}": t
            for n, t in model.state_dict().items()
        },
    ],
    ids=["compiled", "checkpointed", "data parallel", "fsdp"],
)
def test_names_of_wrappers_are_taken_out(wrap: Callable[[Any], Any], pushes: Pushes) -> None:
    model = Tied(tied=False)
    model.model["q_proj"] = checkpoint_wrapper(model.model["q_proj"])
    pushes.sync([wrap(model)], whole_side(UNTIED)).push()
    assert torch.equal(pushes.targets[0].weights["lm_head.weight"], model.lm_head.weight)
    name = "model.q_proj.weight"
    assert torch.equal(pushes.targets[0].weights[name], model.model["q_proj"].weight)


def test_a_part_that_is_called_as_a_wrapper_is_left_alone(pushes: Pushes) -> None:
    tensors = {"module.w": torch.ones(2), "head": torch.ones(3)}
    pushes.sync([tensors], whole_side(tensors)).push()
    assert torch.equal(pushes.targets[0].weights["module.w"], tensors["module.w"])


def test_names_that_collide_are_refused(open_engine: Callable[..., TransferEngine]) -> None:
    tensors = {"a._orig_mod.w": torch.ones(2), "a.w": torch.ones(2)}
    with pytest.raises(InvalidArgument, match=r"`a._orig_mod.w` and `a.w` are both `a.w` without"):
        SourceTensors(tensors, open_engine())


ENGINES = {
    "both": UNTIED,
    "embedding": TIED,
    "head": {n: t for n, t in UNTIED.items() if n != "model.embed_tokens.weight"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", ["module", "names", "replica"])
def test_a_tied_head_goes_to_engines_that_tie_it_and_to_others(
    source: str, engine: str, pushes: Pushes
) -> None:
    model = Tied()
    held: Any = model.state_dict() if source == "names" else model
    side = whole_side(ENGINES[engine])
    make: Any = WeightSource
    if source == "replica":
        make = lambda held, **kw: ReplicaSource(held, LayoutReplica(side), **kw)  # noqa: E731
    sync = pushes.sync([held], side, make)
    for _ in range(2):
        assert sync.push().left == ()
        with pushes.targets[0].reading() as weights:
            assert all(torch.equal(weights[name], model.state_dict()[name]) for name in weights)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)


@pytest.mark.parametrize("replica", [False, True], ids=["shards", "replica"])
def test_rs_1_a_head_that_may_differ_from_the_embedding_does_not_stay_behind(
    pushes: Pushes, replica: bool
) -> None:
    side = whole_side(TIED)
    make: Any = WeightSource
    if replica:
        make = lambda held, **kw: ReplicaSource(held, LayoutReplica(side), **kw)  # noqa: E731
    model = Tied(tied=False)
    model.lm_head.weight = torch.nn.Parameter(model.model["embed_tokens"].weight.detach().clone())
    with pytest.raises(ExtraTensors, match=r"needs `lm_head.weight` .*doesn't tie the head"):
        pushes.sync([model], side, make).push()
    pushes.close()
    model.lm_head.weight = model.model["embed_tokens"].weight
    sync = pushes.sync([model], side, make)
    sync.push()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(WeightSyncError, match=r"`lm_head.weight` .*tied to "):
        sync.push()


class Lora(torch.nn.Module):
    """A linear layer with adapters, with the attributes of PEFT's."""

    def __init__(self, base: torch.nn.Linear, *, adapters: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = base
        rows, columns = base.weight.shape
        ranks = {name: 2 + i for i, name in enumerate(adapters)}
        self.lora_A = torch.nn.ModuleDict(
            {name: torch.nn.Linear(columns, r, bias=False) for name, r in ranks.items()}
        )
        self.lora_B = torch.nn.ModuleDict(
            {name: torch.nn.Linear(r, rows, bias=False) for name, r in ranks.items()}
        )
        self.lora_embedding_A = torch.nn.ParameterDict()
        self.scaling = {name: 0.5 + i for i, name in enumerate(adapters)}
        self.active_adapters = list(adapters)
        self.merged_adapters: list[str] = []
        self.fan_in_fan_out = False
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def merged(self) -> torch.Tensor:
        out = self.base_layer.weight.detach().clone()
        for name in self.active_adapters:
            delta = self.lora_B[name].weight @ self.lora_A[name].weight
            out += (delta * self.scaling[name]).detach()
        return out


def adapted(**options: Any) -> tuple[torch.nn.Module, Lora]:
    model = Tied()
    layer = Lora(model.model["q_proj"], **options)
    model.model["q_proj"] = torch.compile(layer)
    peft = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": model})})
    return peft, layer


@pytest.mark.parametrize("replica", [False, True], ids=["shards", "replica"])
@pytest.mark.parametrize("formats", [None, {"*q_proj*": Cast("float16")}], ids=["", "cast"])
def test_rs_1_adapters_arrive_merged_and_the_base_stays(
    pushes: Pushes, replica: bool, formats: Any
) -> None:
    model, layer = adapted(adapters=("default", "other"))
    before = layer.base_layer.weight.detach().clone()
    side = whole_side(TIED)
    if formats:
        side = quantised_target(side, formats)
    options: dict[str, Any] = {"formats": formats}
    if replica:
        options = {
            "source": lambda held, **kw: ReplicaSource(
                held, LayoutReplica(side), formats=formats, **kw
            )
        }
    sync = pushes.sync([model], side, **options)
    for _ in range(2):
        sync.push()
        with pushes.targets[0].reading() as weights:
            dtype = weights["model.q_proj.weight"].dtype
            assert torch.equal(weights["model.q_proj.weight"], layer.merged().to(dtype))
        assert torch.equal(layer.base_layer.weight, before)
        with torch.no_grad():
            layer.lora_B["other"].weight.mul_(3)
            layer.scaling["default"] = 4.0


def test_rs_1_adapters_have_the_same_bits_under_autocast(
    open_engine: Callable[..., TransferEngine],
) -> None:
    model, layer = adapted()
    held = SourceTensors(model, open_engine())
    held.gather_adapters()
    with torch.autocast("cpu", torch.bfloat16):
        merged = held.local("model.q_proj.weight")
    assert torch.equal(merged, layer.merged())
    held.close()


def test_rs_1_an_adapter_that_is_made_after_a_push_arrives_after_the_next_connect(
    pushes: Pushes,
) -> None:
    model, layer = adapted()
    layer.active_adapters = []
    sync = pushes.sync([model], whole_side(TIED))
    sync.push()
    layer.active_adapters = ["default"]
    sync.connect()
    sync.push()
    with pushes.targets[0].reading() as weights:
        assert torch.equal(weights["model.q_proj.weight"], layer.merged())


def test_rs_1_an_adapter_that_is_trained_while_a_push_reads_it_is_named(
    pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layer = adapted()
    sync = pushes.sync([model], whole_side(TIED))
    send = StepSender.send

    def train_and_send(*args: Any) -> None:
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(3)
        send(*args)

    monkeypatch.setattr(StepSender, "send", train_and_send)
    with pytest.raises(WeightSyncError, match=r"`model\.q_proj\.weight` was changed while a push"):
        sync.push()


def test_a_push_that_fails_keeps_no_gathered_adapter(pushes: Pushes) -> None:
    model, layer = adapted()
    formats = {"*q_proj*": Cast("float16")}
    sync = pushes.sync([model], quantised_target(whole_side(TIED), formats), formats=formats)
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(torch.nan)
    with pytest.raises(WeightSyncError, match=r"`?model\.q_proj\.weight"):
        sync.push()
    assert pushes.sources[0]._tensors._factors == {}


def test_adapters_that_are_disabled_or_no_lora_are_refused(pushes: Pushes) -> None:
    model, layer = adapted()
    sync = pushes.sync([model], whole_side(TIED))
    sync.push()
    layer.disable_adapters = True
    with pytest.raises(WeightSyncError, match=r"adapters of `.*q_proj.*` are disabled; push out"):
        sync.push()
    layer.disable_adapters = False
    layer.active_adapters = []
    with pytest.raises(
        WeightSyncError, match=r"`model.q_proj.weight` differs .*computed .*connect"
    ):
        sync.push()
    layer.active_adapters, layer.lora_bias = ["default"], {"default": True}
    with pytest.raises(WeightSyncError, match=r"`default` of `.*q_proj.*` has a bias of its own"):
        sync.push()
    del layer.lora_A, layer.lora_bias
    with pytest.raises(WeightSyncError, match=r"the adapter `default` of Lora, expected LoRA"):
        sync.push()


def test_rs_1_adapters_that_peft_leaves_out_beside_merged_ones_are_refused(pushes: Pushes) -> None:
    model, layer = adapted(adapters=("default", "other"))
    sync = pushes.sync([model], whole_side(TIED))
    sync.push()
    layer.merged_adapters = ["default"]
    with pytest.raises(WeightSyncError, match="without the active `other`"):
        sync.push()
    layer.merged_adapters = ["default", "other"]
    sync.connect()
    sync.push()
    pushed = pushes.targets[0].weights["model.q_proj.weight"]
    assert torch.equal(pushed, layer.base_layer.weight)


def test_a_module_that_is_trained_beside_the_original_takes_its_place(pushes: Pushes) -> None:
    class Beside(torch.nn.Module):
        active_adapters = ("default",)

        def __init__(self, original: torch.nn.Module, trained: torch.nn.Module) -> None:
            super().__init__()
            self.original_module = original
            self.modules_to_save = torch.nn.ModuleDict({"default": trained})

    model = Tied(tied=False)
    trained = torch.nn.Linear(4, 6, bias=False)
    model.lm_head = Beside(model.lm_head, trained)
    pushes.sync([model], whole_side(UNTIED)).push()
    assert torch.equal(pushes.targets[0].weights["lm_head.weight"], trained.weight)
    del model.lm_head.modules_to_save
    with pytest.raises(InvalidArgument, match="`lm_head` is a Beside, whose adapter `default`"):
        pushes.sync([model], whole_side(UNTIED))


def shards(tensors: Tensors, world: int, placements: Callable[[str], Any], shape: Any) -> list[Any]:
    """By rank, DTensors over a mesh of such a shape."""
    out: list[dict[str, torch.Tensor]] = []
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", shape)
            out.append(
                {
                    name: _shard(tensor, mesh, placements(name), rank)
                    for name, tensor in tensors.items()
                }
            )
    return out


def _shard(tensor: torch.Tensor, mesh: Any, placements: Any, rank: int) -> DTensor:
    local, coordinates = tensor, mesh.get_coordinate()
    for placement, at, ways in zip(placements, coordinates, mesh.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts = local.chunk(ways, placement.dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = parts[at] if at < len(parts) else empty
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def test_shards_of_adapted_weights_are_those_of_the_merged_whole(pushes: Pushes) -> None:
    world, layers, models = 3, [], []
    torch.manual_seed(1)
    full = Lora(torch.nn.Linear(33, 70, bias=False))
    for shard in shards({"w": full.base_layer.weight.data}, world, lambda _: [Shard(0)], (world,)):
        layer = Lora(torch.nn.Linear(33, 70, bias=False))
        layer.load_state_dict(full.state_dict())
        layer.base_layer.weight = torch.nn.Parameter(shard["w"])
        layers.append(layer)
        models.append(torch.nn.ModuleDict({"q_proj": layer}))
    pushes.sync(models, whole_side({"q_proj.weight": full.merged()})).push()
    assert torch.equal(pushes.targets[0].weights["q_proj.weight"], full.merged())


def test_a_tie_is_seen_where_a_rank_has_no_part_of_it(pushes: Pushes) -> None:
    whole, models = TIED["model.embed_tokens.weight"], [Tied() for _ in range(4)]
    parts = shards({"w": whole}, 4, lambda _: [Shard(0)], (4,))  # of six rows
    for model, part in zip(models, parts, strict=True):
        model.lm_head.weight = model.model["embed_tokens"].weight = torch.nn.Parameter(part["w"])
    pushes.sync(models, whole_side(TIED)).push()
    assert torch.equal(pushes.targets[0].weights["model.embed_tokens.weight"], whole)


CONFIG = SMALL["qwen3_moe"]
FULL = noise(CONFIG)


def stacked(full: Tensors) -> dict[str, torch.Tensor]:
    """As transformers 5 holds it."""
    out: dict[str, torch.Tensor] = {}
    experts = CONFIG.moe.experts if CONFIG.moe else 0
    for name, tensor in full.items():
        prefix, found, _ = name.partition(".experts.")
        if not found:
            out[name] = tensor
        elif f"{prefix}.experts.down_proj" not in out:

            def each(part: str, prefix: str = prefix) -> list[torch.Tensor]:
                return [full[f"{prefix}.experts.{e}.{part}.weight"] for e in range(experts)]

            gate_up = zip(each("gate_proj"), each("up_proj"), strict=True)
            out[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(p) for p in gate_up])
            out[f"{prefix}.experts.down_proj"] = torch.stack(each("down_proj"))
    return out


PLACEMENTS = {
    "shard 0": ((4,), [Shard(0)]),
    "shard 1": ((4,), [Shard(1)]),
    "shard 1, uneven": ((5,), [Shard(1)]),
    "shard 2": ((3,), [Shard(2)]),
    "replicas": ((2, 2), [Replicate(), Shard(1)]),
    "experts and rows": ((2, 2), [Shard(0), Shard(1)]),
    "experts twice": ((2, 2), [Shard(0), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(1), Shard(2)]),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_stacked_experts_fill_engines(kind: str, pushes: Pushes) -> None:
    shape, placements = PLACEMENTS[kind]
    world = torch.Size(shape).numel()

    def of(name: str) -> Any:
        return placements if ".experts." in name else [Shard(0)] + [Replicate()] * (len(shape) - 1)

    side = target_side(CONFIG, tp=2, ep=2 if world == 4 else 1)
    pushes.sync(shards(stacked(FULL), world, of, shape), side).push()
    for target in pushes.targets:
        wanted = expected_containers(
            CONFIG, FULL, tp=2, ep=2 if world == 4 else 1, rank=target.rank
        )
        assert_same(target.weights, wanted)


def test_stacked_experts_are_converted_as_single_ones_are(pushes: Pushes) -> None:
    plain = {name: torch.randn(t.shape).to(t) for name, t in FULL.items()}
    formats = linear_formats("qwen3_moe", Cast("float16"))
    side = quantised_target(target_side(CONFIG, tp=2), formats)
    arrived = []
    for held in ([plain], shards(stacked(plain), 2, lambda _: [Shard(0)], (2,))):
        pushes.sync(held, side, formats=formats).push()
        arrived.append([{n: t.clone() for n, t in w.weights.items()} for w in pushes.targets])
        pushes.close()
    for one, other in zip(*arrived, strict=True):
        assert_same(one, other)


def test_stacks_of_another_form_are_not_taken_for_these(pushes: Pushes) -> None:
    tensors = stacked(FULL)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    with pytest.raises(MissingTensors, match=r"`model.layers.0.mlp.experts.0.down_proj.weight`"):
        pushes.sync([tensors], target_side(CONFIG, tp=2)).connect()


def test_draft_layers_are_further_containers(pushes: Pushes) -> None:
    draft = {"mtp.0.eh_proj.weight": torch.randn(8, 16), "mtp.0.norm.weight": torch.randn(16)}
    base = target_side(CONFIG, tp=1)
    side = Side.of(base.ranks, [*base.containers, *whole_side(draft).containers])
    with pytest.raises(ExtraTensors, match=r"`mtp.0.eh_proj.weight`.*draft \(MTP\) layers"):
        pushes.sync([FULL | draft], base).connect()
    pushes.close()
    assert pushes.sync([FULL | draft], side).push().left == ()
    weights = pushes.targets[0].weights
    assert_same({name: weights[name] for name in draft}, draft)
