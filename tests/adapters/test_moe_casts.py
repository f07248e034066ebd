"""Tokens in four bits, against vLLM's reference and the packing of compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from fabric_ray.moe import cast
from tests.adapters.moe_rank import from_four_bits, through_four_bits, vllm_four_bits


def tokens(seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 512, generator=g)
    x *= 2.0 ** torch.randint(-20, 12, (64, 1), generator=g)
    x[3], x[4, :16] = 0.0, 0.0
    # Between two values, where the even one is taken.
    x[0] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64)
    x[1] = -x[0]
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("magnitude", [6.0, 448.0, 1e-3, 1e4])
@pytest.mark.parametrize("seed", range(5))
def test_bits_are_those_of_vllm_and_compressed_tensors(seed: int, magnitude: float) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    x, scale = tokens(seed), torch.tensor([448 * 6 / magnitude])
    values, scales = vllm_four_bits()["ref_nvfp4_quant"](x, scale, 16)
    ours, ours_scales = cast.to_nvfp4(x, scale)
    assert ours_scales.dtype == torch.float8_e4m3fn
    assert torch.equal(ours_scales.float(), scales)
    assert torch.equal(ours, pack_fp4_to_uint8(values))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (128, 64), (130, 192)])
def test_vllm_reads_the_tiles_of_scales(rows: int, hidden: int) -> None:
    scale = torch.tensor([448 * 6 / 4.0])
    x = torch.randn(3, rows, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed, scales = cast.to_nvfp4(x.flatten(0, 1), scale)
    tiles = cast.scale_tiles(3, rows, hidden // 16, scales.dtype, x.device)
    cast.fill_tiles(tiles, scales.view(3, rows, -1))
    back = from_four_bits(packed.view(3, rows, -1), tiles, scale)
    assert torch.equal(back.flatten(0, 1), through_four_bits(x.flatten(0, 1), scale))
