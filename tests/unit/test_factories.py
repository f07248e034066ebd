"""Each call of a torch factory names its dtype and its device: none follows torch's defaults."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACTORIES = frozenset(
    [
        *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye"),
        *("full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
        *("range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    ]
)
# These follow the default dtype and take no device; torch.tensor(dtype=) replaces them.
LEGACY = frozenset({"Tensor", "FloatTensor", "DoubleTensor", "LongTensor", "IntTensor"})


def unnamed(source: str, path: str) -> list[str]:
    """Factory calls without a dtype or a device, as ``path:line: call``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch"):
            continue
        named = {keyword.arg for keyword in node.keywords}
        if name in LEGACY or (name in FACTORIES and not {"dtype", "device"} <= named):
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_factory_call_names_its_dtype_and_device() -> None:
    files = [f for top in ("fabric_ray", "kernels") for f in (ROOT / top).rglob("*.py")]
    assert len(files) > 300
    found = [line for f in files for line in unnamed(f.read_text(), str(f.relative_to(ROOT)))]
    assert not found, "name dtype= and device=:\n" + "\n".join(found)
