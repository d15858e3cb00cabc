# SPDX-License-Identifier: Apache-2.0
"""``torchq.from_torch_ao``: models that torch.ao.quantization has converted."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from torchq.convert.dispatch import dispatches
from torchq.migrate.ao_graph import AoGraph, Params, the_only
from torchq.migrate.ao_modules import (
    DYNAMIC,
    LAYERS,
    STATIC,
    fake_quantizer,
    float_meaning,
    kind,
    unquantized,
    weight_scales,
)
from torchq.migrate.leaves import LAYERS as FLOATS
from torchq.migrate.leaves import report, static_leaf
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Inputs, Model, split_inputs, without_gradients, working_copy
from torchq.models.trees import copied
from torchq.nn.leaf import QuantizedLeaf
from torchq.nn.packed_weights import PackedWeights
from torchq.qat.known_scales import put, rounding, with_known_scales
from torchq.quantization.qparams import QParams

_UNKNOWN = "the scale of its source does not follow from the code: pass example_inputs"
_DTYPES = {"torch.quint8": torch.uint8, "torch.qint8": torch.int8}


@torch.inference_mode(False)
@torch.no_grad()
def from_torch_ao(model: Model, example_inputs: Inputs | None = None) -> Model:
    """Take over a model that torch.ao has quantized: eager, FX or dynamic.

    Weights keep their integers, and weights and activations their scales, so that results differ by
    rounding alone. Dynamic layers quantize each row of a source, where torch.ao takes all rows.

    Args:
        model: from ``torch.ao.quantization.convert``, ``convert_fx`` or ``quantize_dynamic``.
        example_inputs: one call's inputs of a static model: a tensor, a tuple, or a dict of keyword
            arguments. With them int8 tensors go from layer to layer. Without, each layer takes and
            gives float32, and its source's scale must follow from the code. A model with dynamic
            layers needs none.

    Returns:
        The int8 model, of the class of ``model``.

    Raises:
        TypeError: ``model`` is no nn.Module, or one of TorchScript.
        ValueError: it has no int8 modules, some have no form here (the message names all of them,
            and why), or the scales of sources do not follow from the code without examples.

    Example:
        >>> import torch, torchq
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> old = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        >>> new = torchq.from_torch_ao(old)
        >>> torch.equal(new[0].layer.packed().unpack(), old[0].weight().int_repr())
        True
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "torchq.from_torch_ao: model must be an nn.Module in Python, got "
            f"{type(model).__name__}. Take it from before torch.jit.script or trace."
        )
    own = working_copy(model, caller="from_torch_ao").eval()
    taken = _Taken(own, example_inputs)
    leaves = taken.leaves()
    if taken.layers and not leaves and example_inputs is None:
        raise ValueError(
            "torchq.from_torch_ao: example_inputs must be given where the scales of sources do not "
            f"follow from the code, as that of {type(model).__name__}, got None. Pass one batch."
        )
    result = taken.put().eval()
    if example_inputs is not None and not taken.dynamic:
        modules = result.named_modules()
        floats = [n for n, m in modules if isinstance(m, FLOATS) and n not in taken.layers]
        result = with_known_scales(result, example_inputs, floats, weights=taken.weights)
    if not dispatches(result):
        kinds = {name: type(layer).__name__ for name, (layer, _) in taken.layers.items()}
        kinds = {name: kinds[name] for name in leaves} | taken.dynamic
        vars(result)["torchq_report"] = report(result, kinds, dict.fromkeys(taken.layers, _UNKNOWN))
    put(result, leaves)
    put(result, rounding(result))
    return cast(Model, refusing_conversions(without_gradients(result.eval())))


class _Taken:
    """The leaves that take the places of a model's modules.

    Attributes:
        modules: by name, in the places of torch.ao's.
        dynamic: names of dynamic layers, and their classes in torch.ao.
        layers: float layers with a static source, by their names in the result, and their weights.
        problems: what has no form here, and why.
        weights: of the leaves and of graphs.
    """

    def __init__(self, model: nn.Module, example_inputs: Inputs | None) -> None:
        self.model, self.ao = model, AoGraph(model)
        self.modules: dict[str, nn.Module] = {}
        self.weights = PackedWeights()
        self.dynamic, self.layers = self.ao.dynamic, self.ao.layers
        self.problems = self.ao.problems
        dtypes = [params[2] for params in self.ao.params.values()]
        dtypes += [str(m.dtype) for m in model.modules() if kind(m) == "quantized.Quantize"]
        self._dtype = (dtypes or ["torch.quint8"])[0]
        self._sources: dict[str, set[Params | None]] = {}
        if example_inputs is not None and not self.ao.graph.nodes:
            self._run(example_inputs)
        for name, module in model.named_modules():
            inside = any(not n or name.startswith(f"{n}.") for n in self.modules)
            if kind(module) and not inside:
                self._take(name, module)
        for name, params in self.ao.rounding_modules().items():
            self.modules[name] = nn.Sequential(model.get_submodule(name), fake_quantizer(*params))
        if isinstance(model, fx.GraphModule):
            self.ao.rewrite()
        self._check()

    def _take(self, name: str, module: Any) -> None:
        found = kind(module)
        self.modules[name] = module
        try:
            if found in DYNAMIC:
                self.modules[name] = DYNAMIC[found](module)
                if ".dynamic." in found:
                    self.dynamic[name] = type(module).__name__
            elif found in STATIC or found == "quantized.QFunctional":
                self.modules[name] = float_meaning(module, self._dtype)
            else:
                raise ValueError("nothing here computes the same")
            if found in LAYERS:
                self.layers[f"{name}.0".lstrip(".")] = unquantized(module), module.weight()
        except ValueError as error:
            self.problems.append(f"'{name}', a {found}: {error}")

    def _run(self, example_inputs: Inputs) -> None:
        """Note the parameters of sources of layers, where code does not trace."""

        def note(name: str, source: Tensor) -> None:
            params = float(source.q_scale()), int(source.q_zero_point()), str(source.dtype)
            self._sources.setdefault(f"{name}.0", set()).add(params)

        layers = {name: m for name, m in self.model.named_modules() if kind(m) in LAYERS}
        handles = [
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
            for name, module in layers.items()
        ]
        args, kwargs = copied(*split_inputs(example_inputs))
        try:
            self.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def leaves(self) -> dict[str, QuantizedLeaf]:
        """Return the layers whose calls all have sources of one known scale, as int8 leaves."""
        found = self._sources
        for node in self.ao.module_calls():
            for name in (str(node.target), f"{node.target}.0"):
                if name in self.layers:
                    found.setdefault(name, set()).add(self.ao.params.get(node.all_input_nodes[0]))
        return {name: self._leaf(name, params) for name, params in the_only(found).items()}

    def _leaf(self, name: str, params: Params) -> QuantizedLeaf:
        (layer, weight), (scale, zero_point, dtype) = self.layers[name], params
        src = QParams.per_tensor(scale, zero_point, _DTYPES[dtype])
        return static_leaf(layer, weight_scales(weight), src, pack=self.weights.packing(name))

    def _check(self) -> None:
        """Raise ValueError where there is nothing to take, or something cannot be taken."""
        if self.problems:
            raise ValueError(
                "torchq.from_torch_ao: model must consist of modules that have a form here, got "
                f"{'; '.join(self.problems)}. Keep these float in torch.ao, or call "
                "torchq.quantize on the float model."
            )
        if not (self.modules or self.ao.params or self.dynamic):
            raise ValueError(
                "torchq.from_torch_ao: model must hold int8 modules of torch.ao, got "
                f"{type(self.model).__name__} without any. Convert it there first, or call "
                "torchq.quantize on the float model."
            )

    def put(self) -> nn.Module:
        """Return the model with the modules in their places."""
        if "" in self.modules:
            return self.modules[""]
        put(self.model, self.modules)
        if isinstance(self.model, fx.GraphModule):
            self.model.recompile()
            # of packed weights, which it has no more
            self.model._state_dict_hooks.clear()
            self.model._load_state_dict_pre_hooks.clear()
        return self.model
