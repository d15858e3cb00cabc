# SPDX-License-Identifier: Apache-2.0
"""``torchq.prepare_qat``: quantizers in a copy of a model, where the int8 model will round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from torchq.attributes.arguments import place_of
from torchq.capture.module_kinds import BATCH_NORM, MATMUL
from torchq.capture.ops import Role
from torchq.convert.api import prepare
from torchq.convert.calibrated import observed_graphs
from torchq.convert.prepared import Prepared
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.swap.weights import leave_fast_paths, split_attention
from torchq.models.inputs import Inputs, Model, split_inputs, working_copy
from torchq.models.state import as_before, same_numbers
from torchq.models.trees import Call, copied
from torchq.nn.batch_norm import TRANSPOSED, weight_of
from torchq.qat.hooks import DST, SRC, freeze_after, round_dst, round_src
from torchq.qat.lower import KEY, Settings
from torchq.qat.quantizer import ActivationQuantizer, WeightQuantizer
from torchq.quantization.config import Overrides, QConfig
from torchq.quantization.ranges import activation_range, weight_range
from torchq.report.rows import Row

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_Group = tuple[int, fx.Node] | str
"""A value: number of its graph and root; of a layer without a graph, the layer's name."""


@torch.inference_mode(False)
def prepare_qat(
    model: Model,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    *,
    learn_scales: bool = False,
    freeze_after: int | None = None,
) -> Model:
    """Return a copy of ``model`` that rounds in training what the int8 model will round.

    Train it like the float model, which should be trained already. Then call ``eval()`` and
    :func:`torchq.convert`; nothing needs calibration. Weights are rounded by their largest values.
    The range of an activation begins with ``example_inputs`` and is a moving average in training.
    Gradients go straight through where nothing is clipped.

    The copy has the model's class, is in training mode, and runs the model's own code. Weights of
    convolutions and linear layers are parametrized: :func:`torch.save` takes its ``state_dict()``,
    and not the copy. Recurrent layers are trained in float, and stay float but for those with
    ``QConfig(dynamic=True)`` in ``overrides``.

    Args:
        model: float32, bfloat16 or float16, on the CPU; the copy may be moved.
        example_inputs: a batch like the training data: a tensor, a tuple, or a dict of keyword
            arguments.
        config: how to quantize, as for :func:`torchq.prepare`. Its observer is not used.
        overrides: exceptions, by name, as for :func:`torchq.prepare`.
        learn_scales: make the scales of weights and activations parameters, with the gradients of
            learned step size quantization (LSQ). Ranges then only give the first scales.
        freeze_after: batches of training after which ranges of activations, and statistics of batch
            norms, stay as they are. None: they move in all of training.

    Raises:
        ValueError, TypeError: as :func:`torchq.prepare`; also where no layer would be rounded, a
            linear layer has another recipe than "fast", or ``freeze_after`` is no int of at least
            0.

    Example:
        >>> images, labels = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
        >>> qat = torchq.prepare_qat(model, images)
        >>> optimizer = torch.optim.SGD(qat.parameters(), 0.01)
        >>> for _ in range(3):
        ...     loss = nn.functional.cross_entropy(qat(images), labels)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> qmodel = torchq.convert(qat.eval(), strict=True)
        >>> [(row.name, row.quantized) for row in torchq.explain(qmodel).rows if row.is_matmul]
        [('0', True), ('3', True)]
    """
    if freeze_after is not None and (type(freeze_after) is not int or freeze_after < 0):
        raise ValueError(
            "torchq.prepare_qat: freeze_after must be None or an int of at least 0, got "
            f"{freeze_after!r}. Give the number of training batches."
        )
    if isinstance(model, nn.Module):
        model = working_copy(model, caller="prepare_qat")
        model = split_attention(model.eval(), dict(model.named_modules()))
        leave_fast_paths(model)
    prepared = prepare(model, example_inputs, config, overrides)
    _check_recipes(prepared)
    args, kwargs = call = copied(*split_inputs(example_inputs))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        _Placing(model, prepared, learn_scales, freeze_after).run(call)
    model.train()
    vars(model)[KEY] = Settings(kwargs or args, config, overrides)
    return model


def _check_recipes(prepared: nn.Module) -> None:
    """Raise ValueError for a linear layer that needs calibration, which training is not."""
    for name, leaf in prepared.named_modules():
        if isinstance(leaf, ObservedLeaf) and leaf.sample is not None:
            bits = "weight_bits=4, " if leaf.config.weight_bits == 4 else ""
            limit = leaf.config.min_sqnr
            told = f"recipe must be 'fast' for linear layers, got {leaf.config.recipe!r}"
            if limit is not None:
                told = f"min_sqnr must be None for linear layers, got {limit:g}"
            raise ValueError(
                f"torchq.prepare_qat: {told} for '{name}': it chooses by calibration data. Leave "
                f"it out, or quantize such layers at run time: overrides={{{name!r}: "
                f"torchq.QConfig({bits}dynamic=True)}}."
            )


class _Placing:
    """Puts quantizers in a model in eval mode.

    Attributes:
        model: gets them.
        modules: its own, without quantizers.
        prepared: the same with observers: says what becomes int8.
    """

    def __init__(
        self, model: nn.Module, prepared: nn.Module, learn: bool, freeze_after: int | None
    ) -> None:
        """Decide where."""
        self.model, self.prepared, self.learn, self.freeze = model, prepared, learn, freeze_after
        self.modules = list(model.modules())
        self.graphs = list(observed_graphs(prepared).values())
        self.leaves = {
            name: leaf.config
            for name, leaf in prepared.named_modules()
            if isinstance(leaf, ObservedLeaf) and not leaf.by_rows and self._is_layer(name)
        }
        self.sources: dict[str, set[_Group]] = {name: set() for name in self.leaves}
        self.moved: set[str] = set()  # layers that read what is moved, or averaged
        self.others: set[_Group] = set()  # groups that something else than a layer reads
        for i, graph in enumerate(self.graphs):
            self._read(i, graph)
        self.quantizers: dict[_Group, ActivationQuantizer] = {}

    def _is_layer(self, name: str) -> bool:
        """Return whether a name is that of a layer which the model's code calls."""
        parent = name.rpartition(".")[0]
        try:
            layer, around = self.model.get_submodule(name), self.model.get_submodule(parent)
        except AttributeError:  # of an attention module that was split
            return False
        return isinstance(layer, MATMUL) and type(around) is not nn.MultiheadAttention

    def _read(self, number: int, graph: Prepared) -> None:
        """Note which groups of a graph layers read, and leave out layers that it has in float."""
        plan = graph.plan
        for layer in plan.layers:
            name = f"{plan.prefix}{layer.op.base}"
            if layer.reason:
                self.leaves.pop(name, None)
                continue
            known = layer.role is Role.MATMUL and name in self.leaves
            if known:
                self.sources[name].add((number, plan.root(layer.srcs[0])))
                if layer.srcs[0] in plan.joined:
                    self.moved.add(name)
            for node in layer.reads[1:] if known else layer.reads:
                if plan.is_int8(node):
                    self.others.add((number, plan.root(node)))

    def run(self, call: Call) -> None:
        """Place all, and take the first ranges from a run."""
        places = self._producers(call)
        for group, modules in places.items():
            for module in modules:
                setattr(module, DST, self._quantizer(group, self._config_of(group)))
                module.register_forward_hook(round_dst)
        for name, config in self.leaves.items():
            layer = self.model.get_submodule(name)
            groups = self.sources[name]
            group = next(iter(groups)) if len(groups) == 1 else name
            setattr(layer, SRC, self._quantizer(group, config))
            if group not in places or name in self.moved:
                layer.register_forward_pre_hook(round_src, with_kwargs=True)
            axis = 1 if isinstance(layer, TRANSPOSED) else 0
            per_channel = config.weight_granularity == "per_channel"
            rounded = WeightQuantizer(
                weight_of(layer), weight_range(config.int8_bits), axis if per_channel else None,
                self.learn,
            )  # fmt: skip
            parametrize.register_parametrization(layer, "weight", rounded, unsafe=True)
        if not self.quantizers:
            raise ValueError(
                "torchq.prepare_qat: model must call a convolution or linear layer that becomes "
                f"int8 with fixed scales, which training rounds by, got {self._found()}."
            )
        self._run(self.model, call)
        for quantizer in self.quantizers.values():
            quantizer.begin()
        for module in self.modules:
            if self.freeze is not None and isinstance(module, BATCH_NORM):
                freeze_after(module, self.freeze)

    def _found(self) -> str:
        """Return the first layer of each reason to have no fixed scales, and what to do."""
        rows: list[Row] = vars(self.prepared)["torchq_report"]
        layers = {row.reason or "dynamic": row.name for row in reversed(rows) if row.is_matmul}
        if not layers:
            return f"{type(self.model).__name__}, which has no layers. Train it as it is"
        told = [f"{place_of(name)} ({reason})" for reason, name in layers.items()]
        return (
            f"{', '.join(sorted(told))}. Quantize one layer without dynamic, weight_bits=4 or an "
            "override of None"
        )

    def _config_of(self, group: _Group) -> QConfig:
        assert not isinstance(group, str)
        plan = self.graphs[group[0]].plan
        return plan.group_config(plan.groups[group[1]])[1]

    def _quantizer(self, group: _Group, config: QConfig) -> ActivationQuantizer:
        """Return the one quantizer of a value."""
        if group not in self.quantizers:
            integers = activation_range(config.activation_dtype, config.activation_bits)
            made = ActivationQuantizer(integers, config.symmetric, self.learn, self.freeze)
            self.quantizers[group] = made.train(False)
        return self.quantizers[group]

    def _producers(self, call: Call) -> dict[_Group, list[nn.Module]]:
        """Return the modules that make the values which not only layers read.

        Of a module that is called once, and around the node of a value, it is the first to end with
        this value as its result.
        """
        observers = [observer for graph in self.graphs for observer in graph.observers]
        values = self._results(self.prepared, observers, call)
        modules = [m for m in self.modules if not isinstance(m, _CONTAINERS)]
        results = self._results(self.model, modules, call)
        names = {module: f"{name}." for name, module in self.model.named_modules() if name}
        single = [(names[m], m, r[0]) for m, r in results.items() if len(r) == 1 and m in names]
        found: dict[_Group, list[nn.Module]] = {}
        for i, graph in enumerate(self.graphs):
            groups = graph.plan.groups.items()
            for (root, nodes), observer in zip(groups, graph.observers, strict=True):
                if (i, root) not in self.others:
                    continue
                made = [
                    next((m for name, m, r in single if f"{inside}.".startswith(name)
                          and r.shape == value.shape and torch.allclose(r, value)), None)
                    for inside, value in zip(_places(graph, nodes), values[observer], strict=False)
                ]  # fmt: skip
                taken = {m for group in found.values() for m in group} | {None}
                if len(made) == len(nodes) and taken.isdisjoint(made):
                    found[i, root] = [m for m in made if m is not None]
        return found

    def _results(
        self, model: nn.Module, modules: Sequence[nn.Module], call: Call
    ) -> dict[nn.Module, list[Tensor]]:
        """Return the tensors that modules give in one run, in the order of the calls' ends."""
        found: dict[nn.Module, list[Tensor]] = defaultdict(list)

        def note(module: nn.Module, inputs: object, result: object) -> None:
            if isinstance(result, Tensor):
                found[module].append(result.clone())

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(note).remove)
            self._run(model, call)
        return found

    def _run(self, model: nn.Module, call: Call) -> None:
        with as_before(model), same_numbers():
            args, kwargs = copied(*call)
            model(*args, **kwargs)


def _places(graph: Prepared, nodes: list[fx.Node]) -> list[str]:
    """Return the names of the modules that the calls of nodes are in."""
    found = [node.meta.get("owner") or node.meta["scope"] for node in nodes]
    return [f"{graph.plan.prefix}{name}" for name in found]
