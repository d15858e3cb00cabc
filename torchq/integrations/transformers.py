# SPDX-License-Identifier: Apache-2.0
"""``torchq.TorchqConfig``: ``from_pretrained`` of transformers quantizes while it loads.

Importing this module registers the configuration and its quantizer with transformers, by the
functions that transformers has for this; ``registration.py`` says when it is imported. A program
that loads a folder of torchq without the registration gets an error of transformers, by the shapes
of the packed weights (``checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchq.attributes.options import (
    WEIGHT_GRANULARITIES,
    EmbeddingBits,
    Granularity,
    GroupSize,
    WeightBits,
)
from torchq.capture.module_kinds import why_sums
from torchq.convert.self_contained import converted, observed
from torchq.convert.swap.checks import check_finite
from torchq.convert.swap.leaves import equivalent_layer
from torchq.convert.swap.observed import ObservedLeaf
from torchq.integrations.checkpoint import (
    QUANTIZED,
    digests_of,
    packed_name,
    read_leaves,
    refusing,
    stored_state,
)
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Model, without_gradients
from torchq.nn.batch_norm import weight_of
from torchq.nn.embedding import QEmbedding
from torchq.nn.experts import QExperts
from torchq.nn.float_modules import is_experts, other_tensors
from torchq.nn.leaf import Leaf, QuantizedLeaf, take_hooks, without_hooks
from torchq.nn.packed_weights import PackedWeights
from torchq.quantization.config import QConfig
from torchq.quantization.ranges import check_choice
from torchq.report import reasons
from torchq.report.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

try:
    from transformers.core_model_loading import ConversionOps, WeightRenaming, rename_source_key
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import HfQuantizer, register_quantization_config
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        "torchq.TorchqConfig: transformers 5.24 or a later 5.x must be installed, got "
        f"{error}. Run: pip install 'torchq-cpu[transformers]'"
    ) from error

_METHOD = "torchq"
_WHERE = "TorchqConfig"
_CHOSEN = (
    *(reasons.SAME_WEIGHT, reasons.NOT_CONVERTED, reasons.READ_WEIGHT, reasons.FLOAT_IN_FILE),
)
"""Reasons that are no surprise: the caller, the code or the file says so."""


class TorchqConfig(QuantizationConfigMixin):
    """Quantize the linear layers of a model while transformers loads it, its embeddings on request.

    Weights become int8. Each row of a source is quantized by its own range, so nothing is
    calibrated, and the rest of the model stays code of transformers, in float32 or bfloat16.
    ``save_pretrained`` writes the packed weights; ``from_pretrained`` of that folder needs no
    configuration.

    Args:
        modules_to_not_convert: linear layers to keep float, by name, end of a name, or regular
            expression, as other configurations of transformers have them. None keeps the output
            embeddings (``lm_head``) float. Layers that share their weight with another module stay
            float in any case.
        weight_granularity: "per_channel" or "per_tensor".
        weight_bits: 8, 7 or 4.
        group_size: values of a row of a 4-bit weight that share a scale, 32, 64 or 128; None is 32.
        embedding_bits: 8 or 4 quantizes the rows of embeddings, too; None keeps them float. Those
            that share their weight with another module stay float in any case.

    Raises:
        ValueError: an argument has another value, or another name.

    Example::

        model = AutoModel.from_pretrained(path, quantization_config=torchq.TorchqConfig())
    """

    def __init__(
        self,
        modules_to_not_convert: Sequence[str] | None = None,
        weight_granularity: Granularity = "per_channel",
        weight_bits: WeightBits = 8,
        quant_method: str = _METHOD,
        group_size: GroupSize | None = None,
        embedding_bits: EmbeddingBits | None = None,
        **others: object,
    ) -> None:
        """See the class; ``quant_method`` is what config.json holds beside the arguments."""
        if others:
            raise ValueError(
                f"torchq.{_WHERE}: arguments must be modules_to_not_convert, weight_granularity, "
                f"weight_bits, group_size or embedding_bits, got {sorted(others)}. Leave others "
                "out."
            )
        check_choice(_WHERE, "quant_method", quant_method, (_METHOD,))
        check_choice(_WHERE, "weight_granularity", weight_granularity, WEIGHT_GRANULARITIES)
        self.quant_method = quant_method
        self.modules_to_not_convert = _checked_names(modules_to_not_convert)
        self.weight_granularity: Granularity = weight_granularity
        self.weight_bits, self.group_size = weight_bits, group_size
        self.embedding_bits: EmbeddingBits | None = embedding_bits
        try:
            self.qconfig()
        except ValueError as error:
            text = str(error).removeprefix("torchq.QConfig")
            raise ValueError(f"torchq.{_WHERE}{text}") from None

    def qconfig(self) -> QConfig:
        """Return what each layer is quantized with."""
        return QConfig(
            dynamic=True,
            weight_granularity=self.weight_granularity,
            weight_bits=self.weight_bits,
            group_size=self.group_size,
            embedding_bits=self.embedding_bits,
        )


def _checked_names(names: Any) -> list[str] | None:
    if names is None:
        return None
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"torchq.{_WHERE}: modules_to_not_convert must be a list of names or None, got "
            f"{names!r}. Write ['lm_head'], say."
        )
    return list(names)


class TorchqQuantizer(HfQuantizer):
    """Makes quantized leaves of linear layers, one by one, as their weights arrive."""

    quantization_config: TorchqConfig

    def __init__(self, quantization_config: TorchqConfig, **kwargs: object) -> None:
        """Start without a model."""
        super().__init__(quantization_config, **kwargs)
        self._files: Sequence[str] | None = None
        self._reasons: dict[str, str] = {}

    def validate_environment(self, device_map: object = None, **kwargs: object) -> None:
        """Raise ValueError for devices other than the CPU."""
        given = device_map.values() if isinstance(device_map, Mapping) else ()
        if others := {str(device) for device in given} - {"cpu"}:
            raise ValueError(
                f"torchq.{_WHERE}: device_map must be None or 'cpu', got {sorted(others)}. int8 "
                "layers of torchq run on CPUs."
            )

    def update_device_map(self, device_map: object) -> object:
        """Return the CPU for maps that leave the choice, as "auto" does."""
        return {"": "cpu"} if isinstance(device_map, str) else device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return bfloat16 where it is asked for, else float32, also for float16."""
        return dtype if dtype == torch.bfloat16 else torch.float32

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: object
    ) -> object:
        self._files = checkpoint_files
        if not self.pre_quantized:
            self._reasons = self._decide(model)
        return model

    def _decide(self, model: PreTrainedModel) -> dict[str, str]:
        """Return linear layers and tables by name, each with why it stays float or ""."""
        asked = self.quantization_config.modules_to_not_convert
        for pattern in asked or ():
            if all(should_convert_module(name, [pattern]) for name, _ in model.named_modules()):
                raise ValueError(
                    f"torchq.{_WHERE}: modules_to_not_convert must name modules of the "
                    f"{type(model).__name__}, got {pattern!r}. Take names from "
                    "model.named_modules()."
                )
        kept = self.get_modules_to_not_convert(model, asked, model._keep_in_fp32_modules)
        ties = model.all_tied_weights_keys
        tied = {name.rpartition(".")[0] for name in (*ties, *ties.values())}
        found: dict[str, str] = {}
        tables = (nn.Embedding,) if self.quantization_config.embedding_bits else ()
        for name, module in model.named_modules():
            if not (isinstance(module, (nn.Linear, Conv1D, *tables)) or is_experts(module)):
                continue
            found[name] = ""
            if name in tied:
                found[name] = reasons.SAME_WEIGHT
            elif not should_convert_module(name, kept):
                found[name] = reasons.NOT_CONVERTED
            elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                found[name] = reasons.READ_WEIGHT
            elif is_experts(module) and other_tensors(module):
                found[name] = reasons.OWN_EXPERTS
        return found

    def param_needs_quantization(self, model: object, param_name: str, **kwargs: object) -> bool:
        """Return True for the weights of layers that become int8."""
        name, _, last = param_name.rpartition(".")
        return last == "weight" and self._reasons.get(name) == ""

    def get_quantize_ops(self) -> ConversionOps:
        """Return what turns a weight into a leaf."""
        return _MakeLeaf(self)

    def make_leaf(self, model: nn.Module, name: str) -> bool:
        """Put a leaf in the place of a loaded float layer; return False where it has none."""
        module = model.get_submodule(name)
        check_finite(_WHERE, module, name)
        layer, config = equivalent_layer(module), self.quantization_config.qconfig()
        if isinstance(layer, nn.Embedding) and config.embedding_bits is not None:
            leaf: nn.Module = QEmbedding.from_float(
                without_hooks(layer), bits=config.embedding_bits
            )
        elif is_experts(module):
            leaf = converted(observed(without_hooks(module), config, name), name, PackedWeights())
        elif isinstance(layer, nn.Linear) and not why_sums(layer):
            leaf = ObservedLeaf(layer, config, name).dynamic(config, PackedWeights())
        else:
            long = why_sums(layer) if isinstance(layer, nn.Linear) else ""
            self._reasons[name] = long or reasons.OWN_CODE
            return False
        model.set_submodule(name, take_hooks(initialized(leaf), module))
        return True

    def update_weight_conversions(
        self, weight_conversions: list[object], model: PreTrainedModel
    ) -> list[object]:
        """Put the leaves of a saved model in their places, where transformers renames the weights.

        Earlier hooks do not know yet how names in the files and in the model correspond.
        """
        if self.pre_quantized:
            with refusing(self._files):
                self._place_leaves(weight_conversions, model)
        return weight_conversions

    def _place_leaves(self, weight_conversions: list[object], model: PreTrainedModel) -> None:
        state = model.state_dict()
        renamings = [c for c in weight_conversions if isinstance(c, WeightRenaming)]
        names: dict[str, str] = {}
        for name, leaf in read_leaves(self._files).items():
            own = "down_proj" if isinstance(leaf, QExperts) else "weight"
            weight = f"{name}.{own}"
            key, _ = rename_source_key(weight, renamings, [], model.base_model_prefix, state)
            if key not in state:  # it belongs to a head that this class has not
                continue
            place = key.removesuffix(f".{own}")
            if isinstance(leaf, QExperts):
                leaf.adopt(model.get_submodule(place))
            model.set_submodule(place, initialized(leaf))
            if isinstance(leaf, Leaf):
                stored, _ = rename_source_key(weight, renamings, [])
                names[stored] = f"{stored.removesuffix('weight')}{packed_name(leaf)}"
        weight_conversions.append(_PackedNames(names))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> nn.Module:
        for name, reason in list(self._reasons.items()):
            if not reason and not isinstance(model.get_submodule(name), QUANTIZED):
                # experts, or its bias came late, or its weight is a new one
                self.make_leaf(model, name)
        if self.pre_quantized:
            with refusing(self._files):
                for module in model.modules():
                    if isinstance(module, QUANTIZED):
                        module.load_state_dict(module.state_dict())  # checks what transformers set
        vars(model)["torchq_report"] = _report(model, self._reasons)
        return refusing_conversions(without_gradients(model))

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the state with the names that files have, and digests for them."""
        return stored_state(model), digests_of(model)

    def is_serializable(self) -> bool:
        """Return True: the state is plain tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return False: int8 layers have no gradients."""
        return False


class _PackedNames(WeightRenaming):
    """Renames packed weights from what files call them to what their layers do."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        """``names``: of files, after all other renamings -> of the model."""
        super().__init__("weight", "weight")
        self._names = names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name, and no pattern: nothing is converted."""
        return self._names.get(source_key, source_key), None

    def reverse_transform(self) -> _PackedNames:
        """Return a renaming of nothing: ``stored_state`` has the names of files."""
        return _PackedNames({})


class _MakeLeaf(ConversionOps):
    """Quantizes weights between reading and storing them, so that few float ones exist at once."""

    def __init__(self, quantizer: TorchqQuantizer) -> None:
        self.quantizer = quantizer

    @torch.inference_mode(False)
    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, object], *, model: Any, missing_keys: set[str], **kwargs: object
    ) -> dict[str, object]:
        return {
            key: value
            for key, value in input_dict.items()
            if not self._became_leaf(model, key, value, missing_keys)
        }

    def _became_leaf(self, model: nn.Module, key: str, value: Any, missing_keys: set[str]) -> bool:
        name = key.rpartition(".")[0]
        if not self.quantizer.param_needs_quantization(model, key):
            return False
        module, weight = model.get_submodule(name), value[0] if isinstance(value, list) else value
        bias = getattr(module, "bias", None)
        if weight_of(module).shape != weight.shape or (bias is not None and bias.is_meta):
            return False  # transformers reports shapes; a late bias is waited for
        module.weight = nn.Parameter(weight, requires_grad=False)
        try:
            made = self.quantizer.make_leaf(model, name)
        except ValueError:  # transformers would bury it in a report; it is raised after loading
            return False
        if made:
            missing_keys.discard(key)
        return made


def initialized(leaf: Model) -> Model:
    """Return the leaf with the mark that keeps transformers from giving it random weights."""
    read = (leaf.weight, leaf.bias) if isinstance(leaf, Leaf) else ()
    for part in (*leaf.modules(), *read):
        if part is not None:
            vars(part)["_is_hf_initialized"] = True
    return leaf


def _report(model: nn.Module, known: Mapping[str, str]) -> list[Row]:
    """Return the rows of ``torchq.explain``; a saved model does not know why layers are float."""
    rows = []
    for name, module in model.named_modules():
        is_table = isinstance(module, QEmbedding) or (
            isinstance(module, nn.Embedding) and name in known
        )
        experts = isinstance(module, QExperts) or is_experts(module)
        if is_table or experts or isinstance(module, (nn.Linear, Conv1D, QuantizedLeaf)):
            quantized = isinstance(module, QUANTIZED)
            reason = "" if quantized else known.get(name, reasons.FLOAT_IN_FILE)
            # a leaf has the attributes of the float layer
            kind = "Embedding" if is_table else "Conv1D" if hasattr(module, "nf") else "Linear"
            kind = "Experts" if experts else kind
            requested = reason in _CHOSEN
            rows.append(Row(name, kind, quantized, reason, name, not is_table, requested))
    return rows


register_quantization_config(_METHOD)(TorchqConfig)
register_quantizer(_METHOD)(TorchqQuantizer)
