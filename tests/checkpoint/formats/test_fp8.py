"""FP8 weights: what they mean, and that what was not changed gets its published bytes back."""

from __future__ import annotations

import pytest
import torch

from moe_asyncrl.checkpoint.formats import fp8
from tests.checkpoint.formats.quantised import FINITE_CODES, blockwise, random_codes, random_scales, same_bits

SHAPES = [((256, 384), (128, 128)), ((300, 200), (128, 128)), ((5, 7), (128, 128)), ((2, 33, 50), (16, 32))]


@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_rectangles_mean_what_the_blocks_say(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = random_codes(shape, generator)
    scales = random_scales(fp8.grid(shape, block), shape[-1], generator)
    meant = blockwise(codes, scales, block)
    assert same_bits(fp8.dequantize(codes, scales, block), meant)
    rows, columns = shape[-2:]
    for _ in range(20):
        (a, b), (c, d) = (sorted((torch.randperm(n + 1, generator=generator)[:2]).tolist()) for n in (rows, columns))
        touched = scales[..., a // block[0] : -(-b // block[0]), c // block[1] : -(-d // block[1])]
        assert same_bits(fp8.dequantize(codes[..., a:b, c:d], touched, block, (a, c)), meant[..., a:b, c:d])


def test_the_meaning_is_that_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(2)
    codes, scales = random_codes((256, 384), generator), random_scales((2, 3), 384, generator)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert same_bits(fp8.dequantize(codes, scales, (128, 128)), theirs)
    planted = fp8.dequantize(codes, scales.roll(1, 1), (128, 128))
    assert float((planted.float() - theirs.float()).abs().max()) > 0.01 * float(theirs.float().abs().max())


def test_every_code_comes_back_under_every_safe_scale() -> None:
    """All 254 finite codes, zeros of both signs and subnormal codes among them, at every exponent of a safe scale, with
    the mantissas at which rounding could go wrong and random ones, of either sign."""
    generator = torch.Generator().manual_seed(3)
    mantissas = torch.cat([1 + torch.arange(64) / 64, 2 - torch.tensor([2.0**-k for k in range(8, 24)])])
    mantissas = torch.cat([mantissas, 1 + torch.rand(32, generator=generator), 1 + 2.0 ** -torch.arange(9.0, 24.0)])
    count = 0
    for exponent in range(-117, 119):
        scales = torch.ldexp(mantissas, torch.tensor(exponent))
        scales = scales[scales <= fp8.SAFE_SCALES[1]]
        scales = torch.cat([scales, -scales])[None]
        codes = FINITE_CODES.view(torch.float8_e4m3fn)[:, None].expand(254, scales.shape[1])
        value = fp8.dequantize(codes, scales, (254, 1))
        back = fp8.quantize(value, (254, 1), scales)
        assert bool(back.kept.all())
        assert same_bits(back.codes, codes) and torch.equal(back.scales, scales)
        count += scales.shape[1]
    assert count > 50_000


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-140, 1e-45, 0.0, 2.0**121, 3e38])
def test_outside_of_them_it_is_said_that_codes_were_lost(scale: float) -> None:
    """So small or large that values coincide, or are infinite: such blocks need their codes kept."""
    codes = FINITE_CODES.view(torch.float8_e4m3fn)[None]
    scales = torch.full((1, 1), scale)
    value = fp8.dequantize(codes, scales, (1, 254))
    back = fp8.quantize(value, (1, 254), scales)
    assert not same_bits(back.codes, codes)
    assert not fp8.SAFE_SCALES[0] <= scale <= fp8.SAFE_SCALES[1]


@pytest.mark.parametrize(("shape", "block"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_blocks_that_changed_get_a_fresh_scale(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    codes = random_codes(shape, generator)
    scales = random_scales(fp8.grid(shape, block), shape[-1], generator)
    value = fp8.dequantize(codes, scales, block).to(dtype)
    back = fp8.quantize(value, block, scales)
    assert bool(back.kept.all())
    assert same_bits(back.codes, codes) and same_bits(back.scales, scales)
    # One value of the last block, by one step of its type.
    changed = value.clone()
    flat = changed[..., -1, -1:]
    flat.copy_(torch.nextafter(flat.float(), torch.tensor(10.0)) if dtype == torch.float32 else flat * 1.01 + 1e-3)
    back = fp8.quantize(changed, block, scales)
    expected = torch.ones_like(back.kept)
    expected[..., -1, -1] = False
    assert torch.equal(back.kept, expected)
    assert torch.equal(back.scales[expected], scales[expected])
    last = changed[..., (scales.shape[-2] - 1) * block[0] :, (scales.shape[-1] - 1) * block[1] :].float()
    largest = last.abs().amax(dim=(-2, -1))
    assert torch.equal(back.scales[..., -1, -1], largest / 448)
    again = fp8.dequantize(back.codes, back.scales, block).float()
    # Three bits behind the point: off by at most a sixteenth of the value, or half the smallest step.
    assert bool(((again - changed.float()).abs() <= changed.float().abs() / 15 + back.scales.max() * 2.0**-10).all())


def test_values_beyond_the_published_scale_get_a_fresh_one() -> None:
    value = torch.full((128, 128), 1.0)
    value[3, 4] = 500.0
    back = fp8.quantize(value, (128, 128), torch.ones(1, 1))
    assert not bool(back.kept.any())
    assert float(back.scales) == pytest.approx(500 / 448)
    assert float(back.codes.float()[3, 4]) == 448.0


def test_without_published_scales_it_is_what_deepseek_writes() -> None:
    """amax / 448 and x / scale, a block at a time; a block of zeros has scale 1 instead of a division by zero."""
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(300, 200, generator=generator).bfloat16()
    value[128:256, :128] = 0
    found = fp8.quantize(value, (128, 128))
    for row in range(3):
        for column in range(2):
            at = (slice(row * 128, (row + 1) * 128), slice(column * 128, (column + 1) * 128))
            largest = value[at].float().abs().max()
            scale = largest / 448 if largest else torch.tensor(1.0)
            assert found.scales[row, column] == scale
            assert same_bits(found.codes[at].contiguous(), (value[at].float() / scale).to(torch.float8_e4m3fn))
    assert not bool(found.kept.any())


def test_scales_that_are_powers_of_two_stay_so() -> None:
    value = torch.tensor([[448.0], [449.0], [1.0], [0.0], [1e-40]])
    found = fp8.quantize(value, (1, 1), power_of_two=True)
    assert found.scales[:, 0].tolist() == [1.0, 2.0, 2.0**-8, 1.0, 2.0**-126]
    assert bool((found.codes.float().abs() <= 448).all())
