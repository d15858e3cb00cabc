# SPDX-License-Identifier: Apache-2.0
"""Growth of a cache: the values of torch.cat, and no result that a later call changes."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from torchq.functional import compress_rows
from torchq.nn import CachedCat

ROWS, HEADS, SIZE = 1100, 3, 64  # more than half a megabyte


def values(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As a decoder makes them: heads behind tokens, seen the other way around."""
    made = torch.randn(2, rows, HEADS, SIZE).to(dtype)
    return made.transpose(1, 2)


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("dim", [2, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grows_as_torch_cat_does(dim: int, dtype: torch.dtype) -> None:
    cat, parts = CachedCat(dim), [values(ROWS, dtype)]
    grown, copies = values(0, dtype), 0
    for count in (1, 1, 3, 1, 200, 1, 70, 1):
        parts.append(values(count, dtype))
    for part in parts:
        before, grown = grown, cat(grown, part)
        copies += not shares(before, grown)
        assert before.shape[2] + part.shape[2] == grown.shape[2]
    assert torch.equal(grown, torch.cat(parts, 2))
    assert copies == 2, "the first result, and the one that had no more room"


def test_only_one_call_gets_the_room() -> None:
    cat, (prompt, one, other) = CachedCat(2), (values(ROWS), values(1), values(2))
    start = cat(values(0), prompt)
    first, second, third = cat(start, one), cat(start, other), cat(start, one)
    assert shares(start, first) and not shares(start, second) and not shares(start, third)
    for made, more in ((first, one), (second, other), (third, one)):
        assert torch.equal(made, torch.cat((prompt, more), 2))
    assert torch.equal(start, prompt)


@pytest.mark.parametrize("dim", [1, -2])
def test_room_is_behind_rows_of_one_dimension(dim: int) -> None:
    """Another cat wrote into the first one's result, which its caller had."""
    made = CachedCat(0)(torch.ones(2, 12, 20_000), torch.ones(1, 12, 20_000))
    more = torch.zeros(3, 9, 20_000)
    grown = CachedCat(dim)(made[:, :3], more)
    assert torch.equal(grown, torch.cat((torch.ones(3, 3, 20_000), more), 1))
    assert made.all()


def test_windows_and_cropped_caches() -> None:
    cat, prompt, more = CachedCat(2), values(ROWS), values(1)
    start = cat(values(0), prompt)
    window = cat(start[:, :, -900:], more)
    assert shares(start, window)
    assert torch.equal(window, torch.cat((prompt[:, :, -900:], more), 2))
    cropped = cat(start[:, :, :-3], more)  # what was cropped is still in `window`
    assert not shares(start, cropped)
    assert torch.equal(cropped, torch.cat((prompt[:, :, :-3], more), 2))
    assert torch.equal(window, torch.cat((prompt[:, :, -900:], more), 2))


def test_a_small_window_lets_go_of_what_was_before() -> None:
    cat = CachedCat(2)
    start = cat(values(0), values(8 * ROWS))
    window = cat(start[:, :, -ROWS:], values(1))
    assert not shares(start, window)


def test_what_is_no_end_of_a_result_is_copied() -> None:
    cat, prompt, more = CachedCat(2), values(ROWS), values(1)
    start = cat(values(0), prompt)
    others = [start[1:], start[:, 1:], start[..., 1:], start.flip(1), start[:, :, ::2], prompt]
    others += [copy.deepcopy(start), start.clone(), start.transpose(0, 1)]
    for cached in others:
        behind = more.new_zeros(*cached.shape[:2], 1, cached.shape[3])
        made = cat(cached, behind)
        assert not shares(cached, made)
        assert torch.equal(made, torch.cat((cached, behind), 2))
    assert shares(start, cat(start, more))


def test_rows_of_one_sequence() -> None:
    cat, start = CachedCat(2), values(4 * ROWS)[:1]
    grown = cat(start[:, :, :0], start)
    assert torch.equal(cat(grown, start), torch.cat((start, start), 2))


def test_modes_of_torch() -> None:
    cat, prompt, more = CachedCat(2), values(ROWS), values(1)
    with torch.inference_mode():
        start = cat(values(0), prompt)
    assert torch.equal(cat(start, more), torch.cat((prompt, more), 2))
    start, wanted = cat(values(0), prompt), torch.cat((prompt, more), 2)
    needs = more.clone().requires_grad_()
    assert cat(start, needs).requires_grad
    with torch.inference_mode():
        assert torch.equal(cat(start, more), wanted)
    compiled = torch.compile(cat, backend="eager", fullgraph=True)
    assert torch.equal(compiled(start, more), wanted)
    assert torch.equal(torch.jit.script(cat)(start, more), wanted)
    traced = torch.jit.trace(cat, (cat(values(0), prompt), more))
    assert torch.equal(traced(start[:, :, :5], more), torch.cat((prompt[:, :, :5], more), 2))


def test_other_shapes_and_dtypes_are_torch_cats_to_judge() -> None:
    cat, prompt = CachedCat(2), values(ROWS)
    start = cat(values(0), prompt)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        cat(start, values(1)[:1])
    assert cat(start, values(1).double()).dtype == torch.float64
    assert cat(prompt, values(0)) is prompt


def test_threads_do_not_share_the_room() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cat, prompt = CachedCat(2), values(ROWS)
    parts = [torch.full((2, HEADS, 1, SIZE), float(i)) for i in range(8)]
    for _ in range(20):
        start = cat(values(0), prompt)
        with ThreadPoolExecutor(8) as pool:
            made = [*pool.map(cat, itertools.repeat(start, 8), parts)]
        for grown, part in zip(made, parts, strict=True):
            assert torch.equal(grown[:, :, ROWS:], part)


def test_views_of_another_dtype_are_copied() -> None:
    """The room of a result is counted in its elements: of bytes, the end of a view is within."""
    cat = CachedCat(0)
    start = cat(torch.ones(1 << 20), torch.ones(4))
    kept = start.clone()
    cached, more = start.view(torch.uint8)[: len(start)], torch.zeros(40, dtype=torch.uint8)
    assert torch.equal(cat(cached, more), torch.cat((cached, more)))
    assert torch.equal(start, kept)


def test_floats_behind_compressed_rows_are_compressed() -> None:
    cat, parts = CachedCat(2), [values(4 * ROWS), values(3), values(1)]
    grown = compress_rows(values(0))
    for part in parts:
        before, grown = grown, cat(grown, part)
    assert shares(before, grown) and cat(grown, values(0)) is grown
    assert torch.equal(grown, compress_rows(torch.cat(parts, 2)))
    assert torch.equal(torch.jit.script(cat)(before, parts[-1]), grown)
