"""What `fabric_ray.topology` and `fabric-ray topo` say about recorded machines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fabric_ray import topology
from fabric_ray.cli.main import app
from fabric_ray.errors import InvalidArgument

TREES = Path(__file__).parents[2] / "native/engine/tests/engine/topology/trees"


def unpack(name: str, root: Path) -> Path:
    """Makes the folder that a recorded machine describes; see the README beside the recordings."""
    for line in (TREES / f"{name}.tree").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        path, link, target = line.partition(" -> ")
        if link:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
            continue
        path, _, files = line.partition(" | ")
        (root / path).mkdir(parents=True, exist_ok=True)
        for name_and_value in shlex.split(files):
            file, _, value = name_and_value.partition("=")
            (root / path / file).write_text(value + "\n")
    return root


@pytest.fixture(autouse=True)
def _no_rules_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.RULES_VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "160")


def topo(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["topo", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_addresses_and_names_stay_whole_at_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unpack("p5.48xlarge", tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = topo("--sys", root)
    assert code == 0
    assert "switch 0000:ab:00.0" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    words = out.split()
    machine = topology.read(root)
    assert all(nic.name in words for nic in machine.nics)
    assert all(pair.name in words for pair in machine.pairs)
    assert not set(out) & set("┃━")


def test_a_machine_is_read_with_types(tmp_path: Path) -> None:
    dgx = topology.read(unpack("dgx-h100", tmp_path))
    assert [node.id for node in dgx.nodes] == [0, 1]
    assert dgx.gpus[0].place.address == "0000:1b:00.0"
    assert dgx.gpus[0].place.root == "pci0000:15"
    assert dict(dgx.gpus[0].distances)["mlx5_0"] == "PXB"
    assert dict(dgx.gpus[0].distances)["mlx5_11"] == "SYS"
    storage = next(nic for nic in dgx.nics if nic.name == "mlx5_1")
    assert (storage.link, storage.gbps, storage.state) == ("Ethernet", 200.0, "ACTIVE")
    assert storage.interfaces == ("ens2f0np0",)
    assert dgx.rails("gpu1") == (topology.Rail("mlx5_3", "PXB"),)
    assert {left_out.nic for left_out in dgx.left_out} == {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"}
    with pytest.raises(KeyError, match="got gpu8, expected one of gpu0, gpu1"):
        dgx.rails("gpu8")


def test_rules_come_from_the_call_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unpack("gb200-nvl72", tmp_path)
    monkeypatch.setenv(topology.RULES_VARIABLE, "gpu0=mlx5_5")
    assert topology.read(root).rails("gpu0") == (topology.Rail("mlx5_5", "SYS"),)
    assert topology.read(root, "gpu0=mlx5_1").rails("gpu0") == (topology.Rail("mlx5_1", "NODE"),)
    assert topology.read(root, "").rails("gpu0") == (topology.Rail("mlx5_0", "NODE"),)


def test_a_rule_that_matches_nothing_is_an_invalid_argument(tmp_path: Path) -> None:
    root = unpack("passthrough-vm", tmp_path)
    with pytest.raises(InvalidArgument, match=r"no device `mlx_0` here, only mlx5_0, mlx5_1"):
        topology.read(root, "gpu0=mlx_0")
    with pytest.raises(InvalidArgument, match="is no sysfs tree"):
        topology.read(tmp_path / "bus")


def test_topo_draws_switches_and_says_why(tmp_path: Path) -> None:
    code, out, _ = topo("--sys", unpack("p5en.48xlarge", tmp_path))
    assert code == 0
    lines = [line.strip(" │├└─") for line in out.splitlines()]
    switch = lines.index("switch 0000:4b:00.0")
    assert lines[switch - 2 : switch] == [
        "NUMA node 0 · CPUs 0-47,96-143",
        "root complex 0000:4a",
    ]
    below = [line.split()[0] for line in lines[switch + 1 : switch + 7]]
    assert below == ["gpu0", "gpu1", "rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"]
    assert "shared out evenly to 2 GPUs" in out
    assert "left out" not in out


def test_topo_marks_ports_that_are_down_and_adapters_with_two_functions(tmp_path: Path) -> None:
    _, out, _ = topo("--sys", unpack("dgx-h100", tmp_path))
    assert "mlx5_8 0000:aa:00.1 · Ethernet 40 Gb/s · ens1f1np1 · DOWN" in out
    assert "root port 0000:a7:01.0" in out
    assert "assumed to serve storage or management" in out


def test_topo_does_without_rdma_and_without_hardware(tmp_path: Path) -> None:
    _, laptop, _ = topo("--sys", unpack("laptop", tmp_path / "laptop"))
    assert "gpu0 0000:01:00.0 · NVIDIA 28a0" in laptop
    assert "no usable RDMA device" in laptop
    _, guest, _ = topo("--sys", unpack("soft-roce-guest", tmp_path / "guest"))
    assert "rxe_h0r0 · Ethernet 2.5 Gb/s · h0r0 · software" in guest


def test_topo_prints_json(tmp_path: Path) -> None:
    code, out, _ = topo("--json", "--sys", unpack("p5.48xlarge", tmp_path))
    machine = json.loads(out)
    assert code == 0
    assert machine["pairs"][0] == {
        "name": "gpu0",
        "rails": [[f"rdmap{bus}s0", "PIX"] for bus in (79, 80, 81, 82)],
        "reason": "all 4 NICs on the same PCIe switch",
    }


def test_topo_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    root = unpack("gb200-nvl72", tmp_path)
    code, out, err = topo("--sys", root, "--rules", "gpu0=mlx5_bond_*")
    assert (code, out) == (2, "")
    assert err.startswith("fabric-ray: the rule `gpu0=mlx5_bond_*` matches nothing")
    assert err.rstrip().endswith(
        "only mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7"
    )
    code, _, err = topo("--sys", tmp_path / "gone")
    assert code == 2
    assert "can't read" in err
