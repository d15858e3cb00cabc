# SPDX-License-Identifier: Apache-2.0
"""Models that see the strides of their values: quantized convolutions give channels-last ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, nn

import torchq

# Code that writes to memory which it may share, or asks for strides; m has convolutions a (3 to 8
# channels) and b (8 to 4), and a linear l of 8 x 8 x 8 inputs.
CODE: dict[str, Callable[[Any, Tensor], Any]] = {}


def code(function: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    CODE[function.__name__] = function
    return function


@code
def view_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).exp()
    z = y.view(y.size(0), -1)
    z.clamp_(max=1.0)
    return m.b(y)


@code
def contiguous_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).exp()
    z = y.contiguous()
    z += 1
    return m.b(y)


@code
def activation_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y = y + y
    y.contiguous().relu_()
    return y


@code
def reshape_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) + x.mean(1, keepdim=True)
    y.reshape(y.size(0), -1).mul_(3)
    return y


@code
def flatten_is_written_by_index(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) + x.mean(1, keepdim=True)
    z = y.flatten(1)
    z[:, :100] = 0
    return y


@code
def module_is_written_behind_layers(m: Any, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    m.flatten(y)[:, :100].mul_(0.0)
    return y.relu()


@code
def source_is_written_behind_the_view(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).exp()
    z = y.reshape(y.size(0), -1)
    y += 2
    return m.l(z)


@code
def view_is_written_behind_an_activation(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x))
    z = y.view(y.size(0), -1)
    z.clamp_(max=0.3)
    return m.b(y)


@code
def reshape_is_written_behind_a_clip(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).clamp(0, 1)
    y.reshape(y.size(0), -1).mul_(3)
    return y


@code
def view_is_written_behind_items(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 0] = 0
    z = y.view(y.size(0), -1)
    z.mul_(2)
    return y


@code
def copy_of_other_strides_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).permute(0, 2, 3, 1)
    z = y.contiguous()
    z -= z.mean(-1, keepdim=True)
    return y + z


@code
def copy_in_another_format_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.to(memory_format=torch.channels_last)
    z.mul_(2)
    return y + z


@code
def tokens_are_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).flatten(2).transpose(1, 2)
    z = y.contiguous()
    z.mul_(2)
    return y + z


@code
def part_is_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).exp()
    y.unbind(1)[0].reshape(-1).zero_()
    return m.b(y)


@code
def memory_of_a_permutation(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).permute(0, 2, 3, 1)
    return m.l(torch.as_strided(y, (y.size(0), 512), (512, 1)))


@code
def memory_of_a_part(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)[:, 1:]
    return torch.as_strided(y, (y.size(0), 448), (512, 1))


@code
def place_in_memory(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return y * (1 + y[:, 1].storage_offset())


@code
def permutation_is_contiguous(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).permute(0, 2, 3, 1)
    return y if y.is_contiguous() else y * 2


@code
def view_as_another(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.l(y.view_as(y.flatten(1)))


@code
def mapped_function(m: Any, x: Tensor) -> Tensor:
    return m.l(torch.vmap(lambda image: image.reshape(-1))(m.a(x)))


@code
def memory_in_order(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.l(torch.as_strided(y, (y.size(0), 512), (512, 1)))


@code
def memory_by_strides(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.l(y.as_strided((y.size(0), 512), (y.stride(0), y.stride(3))))


@code
def complex_numbers(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return torch.view_as_real(torch.view_as_complex(y.reshape(y.size(0), 8, 8, 4, 2)))


@code
def is_contiguous(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x))
    if not y.is_contiguous():
        y = y.contiguous()
    return m.l(y.view(y.size(0), -1))


@code
def one_stride(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x))
    return m.l((y * 2 if y.stride(-1) == 1 else y).reshape(y.size(0), -1))


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    a, b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
    model = Wired(CODE[name], a=a, b=b, l=nn.Linear(512, 4), flatten=nn.Flatten())
    return model.eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", CODE)
def test_code_that_sees_strides(name: str) -> None:
    model, x = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one of them goes on without a graph
        converted = torchq.quantize(model, [x])
    eager = torchq.eager.quantize(model, [x], x)
    with torch.no_grad():
        for found in (converted, eager):
            assert sqnr(model(x), found(x)) > 30
            assert sqnr(model(x), found(x.to(memory_format=torch.channels_last))) > 30
    if isinstance(converted, torch.fx.GraphModule):
        assert torch.equal(torch.jit.script(converted)(x), converted(x))


def test_layers_in_front_of_copies_keep_their_layout() -> None:
    """Only ``view`` needs strides: a copy of other values is as good."""
    wired = Wired(lambda m, x: m.a(x).view(2, -1).relu(), a=nn.Conv2d(3, 8, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torchq.eager.quantize(wired, [x], x).a.layer.contiguous
    wired.wiring[0] = lambda m, x: m.a(x).reshape(2, -1).relu()
    assert not torchq.eager.quantize(wired, [x], x).a.layer.contiguous
