# SPDX-License-Identifier: Apache-2.0
"""One run of the float model: which leaves it calls, and with what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchq.convert.swap.leaves import equivalent_layer
from torchq.convert.weights import ParameterWritten, Products
from torchq.models.inputs import float_tensors
from torchq.models.state import same_numbers, twin
from torchq.models.trees import Args, Call, Kwargs, copied
from torchq.nn.batch_norm import TRANSPOSED
from torchq.nn.float_modules import is_experts
from torchq.planning.lengths import FRESH, SOFTMAX
from torchq.quantization.recipes.phases import largest_phase


@dataclass(frozen=True)
class LeafCall:
    """A call of a leaf.

    Attributes:
        dtypes: of the tensors it got.
        shape: of the first one.
        more: it got other arguments than ``input``, as torch.nn calls the parameter, and the
            ``output_size`` of transposed convolutions.
    """

    dtypes: frozenset[torch.dtype]
    shape: tuple[int, ...]
    more: bool


@dataclass
class Recording:
    """Observations of one run, by qualified name.

    Attributes:
        leaves: the layer of torch.nn that a module is or computes (:func:`equivalent_layer`).
        calls: of leaves.
        read: leaves that are not called, but whose parameters are used.
        phases: leaves behind which functions of angles are -> the largest angle.
        averages: linear leaves that read what attention gives, averages over positions.
        macs: parameters that products read -> multiplications on this example; empty where the
            model does not run while they are counted.
        results: float tensors that the call gave.
    """

    leaves: dict[str, nn.Module] = field(default_factory=dict)
    calls: dict[str, list[LeafCall]] = field(default_factory=lambda: defaultdict(list))
    read: set[str] = field(default_factory=set)
    phases: dict[str, float] = field(default_factory=dict)
    averages: set[str] = field(default_factory=set)
    macs: Mapping[str, int] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)


class _Reads(TorchFunctionMode):
    """Notes the tensors that functions of torch get, and angles that are made of leaves' results.

    A tensor knows the one leaf that it is made of, without a product, and whether it is made of
    weights of a softmax, or of averages by such weights.
    """

    def __init__(self, phases: dict[str, float]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.phases = phases

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        self.seen.update(map(id, leaves))
        result = func(*args, **kwargs)
        tensors, name = [x for x in leaves if isinstance(x, Tensor)], getattr(func, "__name__", "")
        self._note_kind(name, tensors, result)
        origins = {_origin(x) for x in tensors} - {""}
        if len(origins) == 1:
            (origin,) = origins
            angle = largest_phase(name.strip("_"), args)
            if angle is not None:
                self.phases[origin] = max(angle, self.phases.get(origin, 0.0))
            for made in () if name in _PRODUCTS else tree_leaves(result):
                if isinstance(made, Tensor):
                    vars(made)["_torchq_origin"] = origin
        return result

    def _note_kind(self, name: str, read: list[Tensor], result: object) -> None:
        kinds = {_kind(x) for x in read if x.is_floating_point()}
        if name in SOFTMAX:
            kind = _WEIGHTS
        elif name == "scaled_dot_product_attention" or (name in _PRODUCTS and _WEIGHTS in kinds):
            kind = _AVERAGES
        elif name in (*_PRODUCTS, *FRESH) or (name in _SUMS and "" in kinds):
            kind = ""
        else:
            kind = max(kinds, default="")
        if not kind:
            return
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                vars(made)["_torchq_kind"] = kind


_WEIGHTS, _AVERAGES = "weights", "averages"
_SUMS = ("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "cat")
_PRODUCTS = (
    *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("conv1d", "conv2d", "conv3d"),
)


def _kind(tensor: Tensor) -> str:
    """Return whether it is made of weights of a softmax, or of averages by them, or ""."""
    return str(getattr(tensor, "_torchq_kind", ""))


def _origin(tensor: Tensor) -> str:
    """Return the name of the leaf that it is made of, or ""."""
    return str(getattr(tensor, "_torchq_origin", ""))


def record(model: nn.Module, args: Args, kwargs: Kwargs, shared: bool = False) -> Recording:
    """Return what one run of the model tells; it runs a second time if it does not run so.

    A module that is registered under several names is recorded under the first.

    Args:
        model: as plain as it is prepared.
        args: of a call.
        kwargs: of the same call.
        shared: whether the memory of the parameters is that of the user's model.

    Raises:
        ParameterWritten: the model would write to shared parameters.
    """
    run, given = twin(model), copied(args, kwargs)
    products = Products(run, given, shared)
    try:
        recording = _recorded(model, run, given, products)
        recording.macs = products.macs
    except Exception as error:  # the model's own error comes from the second run
        if products.wrote:
            raise ParameterWritten from error
        recording = _recorded(model, twin(model), copied(args, kwargs), nullcontext())
    return recording


def _recorded(
    model: nn.Module, run: nn.Module, given: Call, counting: AbstractContextManager[object]
) -> Recording:
    recording = Recording()
    reads = _Reads(recording.phases)
    for name, module in model.named_modules():
        if (layer := equivalent_layer(module)) is not None:
            recording.leaves[name] = layer
        elif is_experts(module):
            recording.leaves[name] = module
    args, kwargs = given
    with torch.inference_mode(False), torch.no_grad(), same_numbers(), ExitStack() as stack:
        for name in recording.leaves:
            hook = _noting(name, recording)
            handle = run.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(counting)
        stack.enter_context(reads)
        recording.results = float_tensors(run(*args, **kwargs))
    for name in recording.leaves:
        own = map(id, run.get_submodule(name).parameters())
        if not recording.calls[name] and not reads.seen.isdisjoint(own):
            recording.read.add(name)
    return recording


def _noting(name: str, recording: Recording) -> Callable[..., None]:
    is_linear = isinstance(recording.leaves[name], nn.Linear)

    def hook(module: nn.Module, args: Args, kwargs: Kwargs, result: object) -> None:
        if isinstance(result, Tensor):
            vars(result)["_torchq_origin"] = name
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = ["input", "output_size"] if isinstance(module, TRANSPOSED) else ["input"]
        more = len(args) > len(known) or bool(kwargs.keys() - {*known})
        shape = tuple(tensors[0].shape) if tensors else ()
        if is_linear and any(_kind(x) == _AVERAGES for x in tensors):
            recording.averages.add(name)
        recording.calls[name].append(LeafCall(frozenset(x.dtype for x in tensors), shape, more))

    return hook


def results_of(model: nn.Module, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the float tensors that a call gives; random numbers are the same in each."""
    args, kwargs = copied(args, kwargs)
    with torch.no_grad(), same_numbers():
        return float_tensors(model(*args, **kwargs))
