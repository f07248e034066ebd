"""``fabric-ray plan``: what it says of a push is what the push would be."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fabric_ray.cli import options
from fabric_ray.cli.main import app
from fabric_ray.models import config_to_hf, parameter_shapes
from fabric_ray.models.presets import PRESETS
from fabric_ray.plan.types import leaves
from fabric_ray.weights.forecast import peak_nbytes, pushed_sides
from tests.unit.models.small_models import SMALL

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
LLAMA = ["llama-3.1-8b", "--trainer", "fsdp=8", "--rollout", "tp=2,engines=4"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def said(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sides(told: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Bytes by trainer and by rollout."""
    return [*told["balance"]["sent"].values()], [*told["balance"]["received"].values()]


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """A small model with experts, as a Hugging Face checkpoint describes it."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_to_hf(SMALL["qwen3_moe"])))
    return str(path)


def test_bytes_are_those_of_the_layouts() -> None:
    shapes = parameter_shapes(PRESETS["llama-3.1-8b"])
    norms = 2 * sum(shape[0] for name, shape in shapes.items() if name.endswith("norm.weight"))
    rest = 2 * PRESETS["llama-3.1-8b"].parameter_count - norms
    # Four engines: norms on both ranks, half of everything else on each.
    told = said(*LLAMA)
    sent, received = sides(told)
    assert received == [rest // 2 + norms] * 8
    assert len(sent) == 8
    assert told["balance"]["nbytes"] == sum(received) == sum(sent)
    assert told["holders"] == {"1": rest + norms}
    assert told["gathered"] == []
    assert told["exchanged_maxima"] == 0
    assert told["copies"] >= told["copies_stored"] > 0
    assert told["encoded_nbytes"] > 0
    assert told["peak_nbytes"] > 1 << 20
    assert {*told["spent"]} == {"layouts", "plan", "encoding"}


def test_the_floor_is_the_busiest_nic() -> None:
    told = said(*LLAMA, "--nic", "100")
    sent, received = sides(told)
    busiest = max(sent + received)
    assert told["floor_seconds"] == pytest.approx(busiest / 12.5e9)
    assert said(*LLAMA)["floor_seconds"] == pytest.approx(busiest / 50e9)
    assert told["balance"]["sender_imbalance"] == pytest.approx(max(sent) * 8 / sum(sent))


def test_replicas_of_a_megatron_trainer_share_the_sending() -> None:
    trainer = "megatron:tp=2,dp=2,pp=2,stages=20+12"
    told = said("llama-3.1-8b", "--trainer", trainer, "--rollout", "tp=4")
    norms = 65 * 4096 * 2
    sent, _ = sides(told)
    assert len(sent) == 8
    # Norms are whole on every rank of a stage.
    assert told["holders"] == {"2": told["parameters"] * 2 - norms, "4": norms}
    assert min(sent[:4]) > max(sent[4:])
    assert max(sent[:4]) < 1.001 * min(sent[:4])


def test_the_ranks_of_a_group_are_kept_once_for_all_its_experts(experts: str) -> None:
    push = options.push(experts, "fsdp=2", "tp=2,ep=2,engines=4", "bfloat16")
    _, (_, target) = pushed_sides(push)
    found = [leaf for each in target.containers for leaf in leaves(each.layout)]
    meshes = [leaf.mesh for leaf in found if ".experts." in leaf.tensor.name]
    assert len(meshes) > 2
    assert len({id(mesh.ranks) for mesh in meshes}) == len({mesh.ranks for mesh in meshes}) == 2


def test_fp8_is_half_the_bytes_and_scales(experts: str) -> None:
    ends = ["--trainer", "fsdp=2,ep=2", "--rollout", "tp=2,ep=2"]
    plain, quantised = (said(experts, *ends, "--dtype", d) for d in ("bfloat16", "fp8:channel"))
    assert 0.25 < quantised["balance"]["nbytes"] / plain["balance"]["nbytes"] < 1
    # Rows lie on one rank each, blocks of rows don't.
    assert quantised["exchanged_maxima"] == 0
    assert said(experts, *ends, "--dtype", "fp8:8x8")["exchanged_maxima"] > 0
    assert "edges" in quantised["spent"]


def test_the_table_names_what_matters(experts: str) -> None:
    done = run(
        *(experts, "--trainer", "fsdp=2", "--rollout", "tp=2,ep=2", "--dtype", "int8"),
        *("--explain", "model.layers.0.self_attn.qkv_proj.weight", "--rank", "1"),
    )
    assert done.exit_code == 0, done.output
    for text in ("2 trainers to 2 rollouts", "senders 1.", "Gb/s a rank", "gathered", "encoded"):
        assert text in done.stdout
    assert "model.layers.0.self_attn.q_proj.weight" in done.stdout


def test_a_rank_lists_equal_layers_as_one_row() -> None:
    done = CliRunner().invoke(app, ["plan", *LLAMA, "--rank", "1"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert len(lines) < 40
    assert all(len(line) <= 80 for line in lines)
    config = PRESETS["llama-3.1-8b"]
    # Both norms of a layer are of the hidden size, in two bytes.
    row = f"{config.layers}  262.14 kB  0-7            model.layers.*.input_layernorm.weight"
    assert row in {line.strip() for line in lines}
    boxes = said(*LLAMA, "--rank", "1")["explained"]
    for number in range(config.layers):
        assert f"target rank 1 container `model.layers.{number}.mlp.down_proj.weight`" in boxes


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_a_picture_is_one(experts: str, tmp_path: Path, kind: str) -> None:
    picture = tmp_path / f"plan.{kind}"
    done = run(experts, "--trainer", "fsdp=3", "--rollout", "tp=2,ep=2", "--picture", str(picture))
    assert done.exit_code == 0, done.output
    data = picture.read_bytes()
    if kind == "png":
        assert data.startswith(b"\x89PNG")
        return
    svg = ElementTree.fromstring(data[data.index(b"<svg") :])
    assert svg.tag.endswith("svg")
    assert b"trainer rank" in data


def test_the_picture_shows_every_link() -> None:
    from fabric_ray.cli.picture import matrix
    from fabric_ray.cli.words import model, rollouts, trainers
    from fabric_ray.weights.forecast import Push, forecast

    push = Push(model("llama-3.1-8b"), trainers("fsdp=4,pp=2"), rollouts("tp=2,engines=4"))
    plan, _ = forecast(push)
    cells = matrix(plan)
    links = [[plan.bytes_on_link(src, dst) for dst in range(8)] for src in range(8)]
    assert cells.tolist() == links
    assert len({*cells.ravel()}) > 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["llama-9"], "no model is called 'llama-9'; use one of deepseek-v3"),
        (["--trainer", "fsdp=8,dp=2"], "'dp=2' isn't a size; give numbers for some of fsdp"),
        (["--trainer", "fsdp=8,fsdp=2"], "'fsdp=2' is said twice"),
        (["--trainer", "ddp:dp=8"], "'ddp' is no kind of trainer; say fsdp=16"),
        (["--trainer", "megatron:tp=8,ep=2"], "etp=8 times ep=2 doesn't divide the 8 ranks"),
        (["--trainer", "fsdp=8,pp=2,stages=1+2"], "that add up to 32 layers"),
        (["--trainer", "fsdp=8,pp=2,stages=16,16"], "'16' isn't a size"),
        (["--trainer", "fsdp=8,pp=2,stages=a"], "stages=16+15+15"),
        (["--rollout", "tp=3"], "can't be shared evenly by 3 ranks; use tp=1, 2, 4"),
        (["--rollout", "tp=2,engines=1000000"], "rollouts: got 2,000,000 ranks, expected at most"),
        (["--trainer", "fsdp=1000000"], "trainers: got 1,000,000 ranks, expected at most 32,768"),
        (["--trainer", "fsdp=8192", "--rollout", "tp=1,engines=8192"], "67,108,864 pairs"),
        (["--nic", "inf"], "--nic: got inf, expected a number of Gb/s"),
        (["--rollout", "tp=2,engines=0"], "engines=0 must be 1 or more"),
        (["--rollout", ""], "'' isn't a size; give numbers for some of tp, ep, dp, engines"),
        (["--dtype", "fp9"], "'fp9' is none; use bfloat16, float16"),
        (["--dtype", "fp8:0x8"], "'fp8:0x8' is none"),
        (["--dtype", "fp8:100x128"], "has 4096 along dimension 0, not a multiple of"),
        (["--explain", "nope"], "give --rank 0 instead to list the containers"),
        (["--explain", "0.self_attn.o_proj"], "such as model.layers.0.self_attn.o_proj.weight;"),
        (["--explain", "lm_heed.weight"], "got 'lm_heed.weight', expected the name of a container"),
        (["--explain", "lm_heed.weight"], "such as lm_head.weight;"),
        (["--rank", "8"], "--rank: got 8, expected the rank of a rollout, 0-7;"),
        (["--picture", "plan.gif"], "ends in .svg, .png, .html"),
        (["--picture", "nowhere/plan.svg"], "nowhere is no directory"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(arguments: list[str], text: str) -> None:
    rest = dict(zip(LLAMA[1::2], LLAMA[2::2], strict=True))
    model = arguments[:1] if len(arguments) % 2 else LLAMA[:1]
    given = arguments[len(arguments) % 2 :]
    rest |= dict(zip(given[::2], given[1::2], strict=True))
    done = run(*model, *(word for option in rest.items() for word in option))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fabric-ray: ")
    assert text in done.stderr


def test_planning_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys\n"
        "from fabric_ray.cli.main import app\n"
        "app(['plan', *sys.argv[1:], '--dtype', 'fp8:128x128'], standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'matplotlib'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program, *LLAMA], check=True, capture_output=True)


def commands() -> list[str]:
    shown = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    whole = "".join(shown).replace("\\\n", " ")
    return [line for line in whole.splitlines() if line.startswith("fabric-ray plan ")]


def test_the_page_shows_commands() -> None:
    assert len(commands()) > 3


def _case(command: str) -> object:
    """Plans of a trillion parameters take half a minute."""
    return pytest.param(command, marks=[pytest.mark.long] if "kimi" in command else [])


@pytest.mark.parametrize("command", map(_case, commands()))
def test_what_the_page_shows_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*shlex.split(command)[2:])
    assert done.exit_code == 0, done.output


def test_a_kernel_that_tells_no_peak_of_memory_is_no_reason_to_fail(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert peak_nbytes(status) > 1 << 20
    status.write_text("VmSize:\t 512 kB\nVmRSS:\t 256 kB\n")
    assert peak_nbytes(status) > 1 << 20
    status.write_text("VmHWM:\t 512 kB\n")
    assert peak_nbytes(status) == 512 << 10
