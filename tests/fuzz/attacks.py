# SPDX-License-Identifier: Apache-2.0
"""Files as an attacker writes them: other structure, under digests that are right again."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mutations import VALUES, forge_tensor, forge_text, places
from torch import Tensor

from torchq.serialization.allowed import _NAMES, PYTHON, schemas
from torchq.serialization.tensor_file import _digest, _sums, read_tensors, write_tensors

Tensors = dict[str, Tensor]

_WORDS = (
    "os.system builtins.exec builtins.eval builtins.__import__ operator.attrgetter "
    "operator.setitem operator.methodcaller torch.load torch.save torch.hub.load "
    "torch.ops.load_library torch.empty torch.from_file torch.as_strided "
    "torch.set_num_threads torch.manual_seed torch.rand Tensor.data_ptr "
    "Tensor.untyped_storage Tensor.set_ Tensor.resize_ Tensor.numpy Tensor.tolist "
    "Tensor.register_hook Tensor.add_ Tensor.type Tensor.to_dense Tensor.__getattribute__ "
    "Tensor.__reduce__ Tensor.share_memory_ Tensor.backward Tensor.storage Tensor.apply_ "
    "aten::_unsafe_index aten::_index_put_impl_ aten::set_data "
    "aten::_sparse_coo_tensor_unsafe aten::from_file aten::_print aten::__getattr__ "
    "aten::add_.Tensor aten::empty.memory_format aten::embedding_dense_backward "
    "aten::_weight_int4pack_mm_for_cpu aten::rand aten::copy_ aten::resize_ aten::bernoulli "
    "aten::_to_sparse aten::nested_tensor aten::_make_dual torchq::gemm torchq::linear "
    "torchq::rnn prim::device quantized::linear c10d::allreduce_ len.__self__ "
    "math.__loader__.find_spec torch..system nn.linear.__globals__ .:: aten:: "
)
FORBIDDEN = _WORDS.split()
NAMES = [
    *("self", "torch", "device", "inf", "nan", "print", "getattr", "__import__", "lambda", "None"),
    *("_torchq_torch", "_torchq_module_0", "_torchq_site_0", "_torchq_tensor_0", "_torchq_named"),
    *(
        "torchq_check",
        "input_1",
        "x",
        "é",
        "ﬁ",
        "a" * 5000,
        "a b",
        "x=1",
        "x\n",
        "",
        "_",
        "__class__",
    ),
]
PATHS = [
    *(
        "__class__",
        "_modules",
        "_parameters",
        "forward",
        "training",
        "graph",
        "code",
        "spec",
        "a.b",
        "\uff46orward",
        "\uff46orward.__globals__.get",
        "a.forward",
        "a.weight_ih",
    ),
    *(
        "layer",
        "a" * 400,
        "a." * 70 + "b",
        'a"b',
        "a\\b",
        "0",
        "..",
        ".",
        "torchq_graph",
        "__dict__",
    ),
]
INTS = [0, 1, -1, 2, 3, 7, 16, -2, 255, 2**15, 2**20, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63)]
INTS += [2**63 - 1, 2**63, 2**64, 10**30]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.5, 1e-45, 1e30, -1e300, 2.0**62, float("inf"), float("nan")]
TEXTS = ["mean", "sum", "none", "trunc", "floor", "bilinear", "ij,jk->ik", "...i->...", "x", "é"]
DTYPES = ["float32", "int8", "uint8", "int64", "bool", "float64", "bfloat16", "complex64", "qint8"]
GUARDS = [
    *("s0[0] == 2", "s0[0] > 0 and s0[1] < 7", "s0[9] == 1", "s9[0] == 1", "s0[-1] == 1", "True"),
    *("(s0[0]+9)**8 > 0", "((s0[0]+9)**8)**8 > 0", "s0[0] % 0 == 1", "s0[0] // 0 == 1", "s0 == 1"),
    *(
        "s0[0]**99999 > 1",
        "2**9999999 > 1",
        "9" * 5000 + " > 1",
        "(" * 90 + "1" + ")" * 90 + " > 1",
    ),
    *(
        "-" * 3000 + "s0[0] > 1",
        "max(s0[0], 1) == 1",
        "len(s0) > 1",
        "exit() == 1",
        "s0[0] < 1e400",
    ),
    *(
        "s0[0] == s0[1]",
        "s0[0].real == 1",
        "s0[s0[0]] > 1",
        "1 if s0[0] else 2",
        "s0[0] << 99999 > 1",
    ),
]
RESULTS: list[Any] = [
    {"type": "builtins.tuple", "context": "null", "children_spec": []},
    {"type": "builtins.dict", "context": '["a", "a"]', "children_spec": [{}, {}]},
    {"type": "builtins.dict", "context": '{"__enum__": true, "fqn": "os:x", "name": "y"}'},
    {"type": "collections.defaultdict", "context": {"default_factory_module": "antigravity"}},
    {"type": "namedtuple:os:stat_result", "context": None, "children_spec": []},
    {"type": "namedtuple:antigravity:x", "context": None, "children_spec": []},
    {"type": "this.x", "context": "[]", "children_spec": []},
    {"type": "torch.Tensor", "context": "[]", "children_spec": []},
    {"type": "collections.OrderedDict", "context": '[["a"]]', "children_spec": [{}]},
    {"type": "torch.nn.modules.module._IncompatibleKeys", "context": "[]", "children_spec": []},
]


# Graphs: lists of op, name, target, args, kwargs, and a module's source and class


def _argument(pick: random.Random, kind: str, names: list[str]) -> Any:
    """Returns an argument of a type of a schema, or, rarely, of another one."""
    if pick.random() < 0.02:
        return copy.deepcopy(pick.choice(VALUES))
    if kind.startswith("Optional["):
        return None if pick.random() < 0.4 else _argument(pick, kind[9:-1], names)
    if kind.startswith("List["):
        count = pick.choice([0, 1, 1, 2, 2, 2, 3, 4, 9])
        return [_argument(pick, kind[5:-1], names) for _ in range(count)]
    node = {"node": pick.choice(names)}
    match kind:
        case "Tensor":
            return node
        case "int":
            return pick.choice(INTS[: pick.choice([7, 7, 7, len(INTS)])])
        case "float" | "number":
            return pick.choice([pick.choice(INTS[:14]), pick.choice(FLOATS), pick.choice(FLOATS)])
        case "bool":
            return pick.random() < 0.5
        case "str":
            return pick.choice(TEXTS)
        case "ScalarType":
            return {"constant": f"torch.{pick.choice(DTYPES)}"}
        case "MemoryFormat":
            return {"constant": "torch.channels_last"}
    return pick.choice(VALUES)


def _call(pick: random.Random, name: str, names: list[str]) -> list[Any]:
    """Returns a node that calls a function, most often one that files may call."""
    kind = pick.random()
    if kind < 0.05:
        args = [_argument(pick, "Tensor", names) for _ in range(pick.randrange(4))]
        return ["call_function", name, pick.choice(FORBIDDEN), args, {"dict": {}}]
    if kind < 0.15:
        types = [pick.choice(["Tensor", "int", "number"]) for _ in range(pick.choice([1, 2, 2, 3]))]
        args = [_argument(pick, each, names) for each in types]
        return ["call_function", name, pick.choice([*PYTHON]), args, {"dict": {}}]
    base = pick.choice(sorted(_NAMES))
    overload, schema = pick.choice([*schemas(base).items()] or [("", None)])
    target = pick.choice(
        [f"aten::{base}.{overload or 'default'}", f"torch.{base}", f"Tensor.{base}"]
    )
    args, kwargs = [], {}
    for argument in schema.arguments if schema else ():
        if argument.has_default_value() and pick.random() < 0.6:
            continue
        value = _argument(pick, str(argument.real_type), names)
        if argument.kwarg_only or len(args) + len(kwargs) < len(kwargs) * 2 or kwargs:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return ["call_function", name, target, args, {"dict": kwargs}]


def _module_call(pick: random.Random, name: str, names: list[str], tensors: Tensors) -> list[Any]:
    """Returns a node that calls a module of the file, or one of the float model."""
    kinds = [
        pick.choice(["Tensor", "List[Tensor]", "int", "str"]) for _ in range(pick.randrange(3))
    ]
    args = [_argument(pick, kind, names) for kind in ["Tensor", *kinds]]
    modules = sorted({key.removeprefix("torchq_graph.").rpartition(".")[0] for key in tensors})
    source = pick.choice([None, *modules])
    return ["call_module", name, pick.choice([*modules, name]), args, {"dict": {}}, source]


def _insert(pick: random.Random, fields: Any, tensors: Tensors) -> None:
    """Adds a call or a tensor, and lets a later node have its result."""
    nodes = fields["nodes"]
    at = pick.randrange(1, len(nodes))
    names = [node[1] for node in nodes[:at] if node[0] != "output"]
    new = f"n{pick.randrange(10**6)}"
    if pick.random() < 0.15:
        nodes.insert(at, _module_call(pick, new, names, tensors))
    elif pick.random() < 0.25:
        target = pick.choice([*tensors, *PATHS])
        nodes.insert(at, ["get_attr", new, target.removeprefix("torchq_graph."), [], {"dict": {}}])
    else:
        nodes.insert(at, _call(pick, new, names))
    uses = [(box, key) for box, key in places(nodes[at + 1 :]) if key == "node"]
    if uses:
        box, key = pick.choice([uses[-1], uses[-1], pick.choice(uses)])  # the last is the result
        box[key] = new


def _rename(pick: random.Random, fields: Any, tensors: Tensors) -> None:
    """Gives a node another name or target, everywhere or in one place."""
    node = pick.choice(fields["nodes"])
    old, new = node[1], pick.choice(NAMES)
    if pick.random() < 0.4:
        node[2] = pick.choice([*NAMES, *PATHS, *FORBIDDEN, *tensors])
        return
    node[1] = new
    for box, key in places(fields["nodes"]) if pick.random() < 0.8 else ():
        if key == "node" and box[key] == old:
            box[key] = new


def _repeat(pick: random.Random, fields: Any, tensors: Tensors) -> None:
    """Makes a long graph: one call again and again, of the call before or of the same node."""
    nodes = fields["nodes"]
    at = pick.randrange(1, len(nodes))
    names, before = [node[1] for node in nodes[:at]], nodes[at - 1][1]
    call, chained = _call(pick, "r0", names), pick.random() < 0.5
    if pick.random() < 0.5:
        call = ["call_function", "r0", pick.choice(["operator.mul", "torch.relu", "torch.cat"]),
                [{"node": before}] * 2, {"dict": {}}]  # fmt: skip
    made = []
    for i in range(pick.choice([10, 100, 1000, 3000, 12_000])):
        made.append([*copy.deepcopy(call[:1]), f"r{i}", *copy.deepcopy(call[2:])])
        if chained and i:
            for box, key in places(made[-1]):
                if key == "node":
                    box[key] = f"r{i - 1}"
    nodes[at:at] = made


def _swap_nodes(pick: random.Random, fields: Any, tensors: Tensors) -> None:
    nodes = fields["nodes"]
    a, b = pick.randrange(len(nodes)), pick.randrange(len(nodes))
    if pick.random() < 0.5:
        nodes[a], nodes[b] = nodes[b], nodes[a]
    else:  # the module or function of another node
        nodes[a][0], nodes[a][2:] = nodes[b][0], copy.deepcopy(nodes[b][2:])


def _results(pick: random.Random, fields: Any, tensors: Tensors) -> None:
    """Nests or doubles what the graph returns."""
    value = fields["nodes"][-1][3]
    for _ in range(pick.choice([1, 3, 30, 200])):
        value = pick.choice([[value], {"tuple": [value]}, {"dict": {pick.choice(NAMES): value}}])
    fields["nodes"][-1][3] = value if isinstance(value, list) else [value]


_GRAPH = *[_insert] * 12, _rename, _repeat, _swap_nodes, _results


def _graph(pick: random.Random, text: str, tensors: Tensors) -> str:
    fields = json.loads(text)
    if pick.random() < 0.02:
        fields["version"] = pick.choice([1, 2, 3, 4, "3", None, [3]])
    for _ in range(pick.choice([1, 1, 2, 4])):
        pick.choice(_GRAPH)(pick, fields, tensors)
    return json.dumps(fields)


def _call_text(pick: random.Random, text: str, tensors: Tensors) -> str:
    """Returns other guards, arguments or results."""
    fields = json.loads(text)
    match pick.randrange(6):
        case 0 | 1:
            own = fields[pick.choice(["guards", "limits"])]
            own += [pick.choice(GUARDS) for _ in range(pick.choice([1, 2, 50, 3000]))]
        case 2:
            result = copy.deepcopy(pick.choice(RESULTS))
            for _ in range(pick.choice([0, 1, 30, 150])):
                result = {"type": "builtins.list", "context": "null", "children_spec": [result]}
            fields["result"] = json.dumps([1, result])
        case 3:
            size = pick.choice([None, 0, 2, 2**62, -1, "s0", 1.5])
            fields["arguments"] *= pick.choice([1, 1, 2, 500, 2000])
            pick.choice(fields["arguments"])[2] = [size] * pick.choice([0, 1, 3, 70, 5000])
        case 4:
            value: Any = {"argument": pick.choice([0, -1, 1, 10**9, "0"])}
            for _ in range(pick.choice([0, 1, 50])):
                value = {pick.choice(["tuple", "list", "dict", "set"]): [value]}
            fields["values"][pick.choice([*fields["values"], "other", "self"])] = value
        case _:
            names = pick.choice([*NAMES, *fields["values"]])
            fields["neutral"] = {names: pick.choice([[None], [True, 1], [[]], None, [0.5]])}
    return json.dumps(fields)


# Whole files


def _text(value: Tensor) -> str:
    return bytes(value.flatten().view(torch.uint8).tolist()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


def _edit_text(pick: random.Random, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Changes one of the texts: a graph, guards, a spec, the report or the aliases."""
    kinds = {".torchq_graph": _graph, ".torchq_call": _call_text}
    ends = [*[".torchq_graph"] * 6, *[".torchq_call"] * 2]
    ends += [".spec", ".torchq_report", ".torchq_aliases"]
    end = pick.choice([e for e in ends if any(f".{n}".endswith(e) for n in tensors)] or [""])
    name = pick.choice([n for n in tensors if f".{n}".endswith(end)])
    try:
        if end == ".torchq_report":
            text = zlib.decompress(bytes(tensors[name].tolist())).decode()
            text = forge_text(pick, text) * pick.choice([1, 1, 1, 20_000])
            tensors[name] = torch.frombuffer(
                bytearray(zlib.compress(text.encode())), dtype=torch.uint8
            )
        else:
            text = _text(tensors[name])
            other: Callable[..., str] = kinds.get(end, lambda pick, text, _: forge_text(pick, text))
            tensors[name] = _bytes(other(pick, text, tensors))
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        zlib.error,
        RecursionError,
        AttributeError,
    ):
        return  # changed before


def _edit_names(pick: random.Random, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Renames, doubles or removes tensors, or those of a whole module."""
    start = pick.choice([*tensors]).rpartition(".")[0]
    own = [n for n in tensors if n.startswith(start)] if start and pick.random() < 0.6 else []
    own = own or [pick.choice([*tensors])]
    other = pick.choice([*PATHS, *(n.rpartition(".")[0] for n in tensors), f"{start}.layer"])
    copies, keeps = pick.choice([1, 1, 1, 5, 300]), pick.random() < 0.6
    for i in range(copies):
        for name in own:
            place = other if copies == 1 else f"{other}.{i}"
            new = name.replace(start, place, 1) if start else f"{place}.{name}"
            if name in tensors:
                tensors[new] = tensors[name]
    for name in own if not keeps else ():
        tensors.pop(name, None)


def _edit_aliases(pick: random.Random, tensors: Tensors, metadata: dict[str, str]) -> None:
    names = [*tensors, *PATHS]
    count = pick.choice([1, 2, 100, 5000])
    pairs = {pick.choice(names) + ("" if count < 9 else str(i)): pick.choice(names)
             for i in range(count)}  # fmt: skip
    tensors["torchq_aliases"] = _bytes(json.dumps(pairs))
    if pick.random() < 0.5:  # those that stand for others are not there
        for name in pairs:
            tensors.pop(name, None) if name != "torchq_aliases" else None


def _edit_tensor(pick: random.Random, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Gives a tensor other values, another dtype, or another shape of as many bytes or of none."""
    name = pick.choice([*tensors])
    value = tensors[name]
    match pick.randrange(4):
        case 0:
            tensors[name] = forge_tensor(pick, value)
        case 1:
            dtype = pick.choice([torch.uint8, torch.int8, torch.int32, torch.float32, torch.int64])
            flat = value.flatten().view(torch.uint8)
            tensors[name] = flat[: flat.numel() // 8 * 8].view(dtype)
        case 2:
            shape = pick.choice([(0,), (2**40, 0), (0, 2**62), (1,) * 60, (0,) * 65, ()])
            tensors[name] = torch.zeros(shape, dtype=value.dtype)
        case _:
            tensors[name] = value.reshape([*reversed(value.shape)] if value.dim() > 1 else [1, -1])


def _edit_metadata(pick: random.Random, tensors: Tensors, metadata: dict[str, str]) -> None:
    key = pick.choice([*metadata, "torchq_format", "writer", "elsewhere"])
    other = pick.choice(["", "0", "1", "2", "99", "[]", "{}", "torchq", '["a"]', '[["a","b"]]'])
    try:
        metadata[key] = pick.choice([other, forge_text(pick, metadata.get(key, "[]"))])
    except (ValueError, RecursionError):
        metadata[key] = other
    metadata.pop(pick.choice([*metadata, "digest"]), None) if pick.random() < 0.2 else None


def _edit_header(pick: random.Random, path: Path) -> None:
    """Changes shapes, dtypes and places in the header, and makes the digest right where it can."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(pick.choice([1, 1, 3])):
        entry = header[pick.choice([name for name in header if name != "__metadata__"])]
        match pick.randrange(4):
            case 0:
                entry["shape"] = pick.choice(
                    [[2**62, 4], [2**40, 0], [-1], [1] * 100, [None], [], [2**62] * 100_000]
                )
            case 1:
                entry["dtype"] = pick.choice(["F64", "U8", "BOOL", "F8_E4M3", "C64", "F4", 7])
            case 2:
                entry["data_offsets"] = pick.choice([[0, len(data)], [0, 2**62], [5, 3], [0], "ab"])
            case _:
                name, other = pick.choice([*header]), pick.choice([*header])
                header[name], header[other] = header[other], header[name]
    try:
        header["__metadata__"].pop("digest", None)
        entries = sorted((e["data_offsets"] for n, e in header.items() if n != "__metadata__"))
        views = [memoryview(data)[begin:end] for begin, end in entries]
        header["__metadata__"]["digest"] = _digest(header, views, _sums)
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def attack_index(pick: random.Random, path: Path) -> None:
    """Puts tensors in files that an index names: elsewhere, linked, missing, or no files."""
    part = path.with_name("part.safetensors")
    path.rename(part)
    names = [*read_tensors(part)[0]]
    (path.parent / "link.safetensors").symlink_to(pick.choice(["/dev/zero", "/etc/passwd", part]))
    places = [part.name, part.name, "link.safetensors", f"../{path.parent.name}/{part.name}", "."]
    places += ["../../../etc/passwd", "/dev/stdin", "", "a" * 5000, "\0", path.name, "config.json"]
    other: Any = pick.choice([*places, *VALUES])
    share = pick.choice([0, 0.1, 1])
    index = {name: other if pick.random() < share else part.name for name in names}
    if pick.random() < 0.2:
        index |= {pick.choice([*PATHS, f"{name}.x"]): part.name for name in names}
    fields = {"metadata": {"total_size": pick.choice(INTS)}, "weight_map": index}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(fields))


_DEEP = "many levels"


def attacked_config(pick: random.Random, text: str, part: str) -> str:
    """Returns a config.json whose part of quantization says something else."""
    fields = json.loads(text)
    own = fields[part]
    for _ in range(pick.choice([1, 1, 2, 4])):
        box, key = pick.choice([(fields, part), *(places(own) if isinstance(own, dict) else [])])
        value: Any = copy.deepcopy(pick.choice([*VALUES, *INTS, *FLOATS, *TEXTS, *NAMES, _DEEP]))
        for _ in range(pick.choice([0, 0, 1, 90])):
            value = pick.choice([[value], {pick.choice(NAMES): value}])
        many = pick.choice([1, 1, 2, 100, 20_000])
        if many * len(json.dumps([value, fields])) < 1 << 22:
            value = pick.choice([value, [value] * many, {f"{key}{i}": value for i in range(many)}])
        if isinstance(box, dict) and pick.random() < 0.3:
            key = pick.choice([*NAMES, "re:(a+)+$", "auto_map", "_target_", "quant_method"])
        box[key] = value
        own = fields[part]
    return json.dumps(fields).replace(json.dumps(_DEEP), "[" * 3000 + "]" * 3000)


_EDITS = *[_edit_text] * 8, _edit_names, _edit_aliases
_EDITS += _edit_tensor, _edit_metadata  # type: ignore[assignment]


def attack(pick: random.Random, path: Path) -> None:
    """Writes the file of an attacker in place of one that torchq wrote."""
    tensors, metadata = read_tensors(path)
    for _ in range(pick.choice([1, 1, 1, 1, 1, 2, 4])):
        pick.choice(_EDITS)(pick, tensors, metadata)
    metadata.pop("digest", None)
    write_tensors("fuzz", path, tensors, metadata)
    if pick.random() < 0.1:
        _edit_header(pick, path)
