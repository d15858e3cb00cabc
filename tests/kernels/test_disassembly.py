# SPDX-License-Identifier: Apache-2.0
"""No accumulator may leave its register inside a K loop: one spill costs up to half of the speed.

The K loop of a tile is its innermost loop that holds a dot product. Inside it, no vector register
may be written to the stack, and no sum may read its other operand from there.
"""

import re
import shutil
import subprocess
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import torchq

DOT = re.compile(r"vpdpbusd|vpmaddwd|vpmaddubsw")
STORE_TO_STACK = re.compile(r"%[xyz]mm\d+,\s*-?(0x)?[0-9a-f]*\(%r[sb]p")
ADD_FROM_STACK = re.compile(r"^vpaddd .*\(%r[sb]p")
PARKED = re.compile(r"^vmov[dq]\s+%xmm\d+,%[re]\w+$")
MOVE = re.compile(r"^vmov(dqa|aps)\w*\s+%[yz]mm\d+,%[yz]mm\d+$")
# GCC 12 keeps up to two of the 24 accumulators of the widened AVX-512 tiles on the stack.
ALLOWED = {"avx512": 2}
# Tiles whose loops are one step each.
STEPS = "(gemm|streamed|rnn|small_group)_tile<|rnn_streamed_(panel|cells)<"
# The sums of amx are in tile registers, which have no other place to be.
TIERS = [isa for isa in torchq.supported_isas() if isa.startswith("avx")]

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing")


def functions(listing: str) -> dict[str, list[tuple[int, str]]]:
    """Name -> (address, instruction) of every function in an objdump listing."""
    result: dict[str, list[tuple[int, str]]] = {}
    body: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if header := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            body = result.setdefault(header[1], [])
        elif instruction := re.match(r"^\s+([0-9a-f]+):\s+(.*)$", line):
            body.append((int(instruction[1], 16), instruction[2].strip()))
    return result


def k_loops(body: list[tuple[int, str]]) -> list[list[str]]:
    """The instructions of every loop with a dot product."""
    index = {address: i for i, (address, _) in enumerate(body)}
    loops = []
    for i, (_, text) in enumerate(body):
        jump = re.match(r"j\w+\s+([0-9a-f]+)", text)
        start = index.get(int(jump[1], 16)) if jump else None
        if start is not None and start <= i:
            loop = [instruction for _, instruction in body[start : i + 1]]
            if any(DOT.search(instruction) for instruction in loop):
                loops.append(loop)
    return loops


def k_loop(name: str, body: list[tuple[int, str]]) -> list[str]:
    """The shortest of them; empty if there is none. All but those around others where cells part
    the products into many, or each end has its own, or what clipped weights lack comes later."""
    loops = k_loops(body)
    several = "rnn_streamed_cells<|small_group_(slide|sums)<|Avx2,.*WeightForm\\)1"
    if re.search(several, name):
        inner = [loop for loop in loops if not any({*other} < {*loop} for other in loops)]
        return [*chain(*inner)]
    return min(loops, key=len, default=[])


def spills(loop: list[str]) -> list[str]:
    """Instructions that keep an accumulator on the stack."""
    return [i for i in loop if STORE_TO_STACK.search(i) or ADD_FROM_STACK.search(i)]


def disassemble(*objects: Path) -> dict[str, list[tuple[int, str]]]:
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", *objects]
    return functions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@cache
def tier_functions(tier: str) -> dict[str, list[tuple[int, str]]]:
    """The functions of all objects of a tier."""
    return disassemble(*Path(__file__).parents[2].glob(f"build/torch-*/isa/{tier}/*.o"))


@needs_objdump
@pytest.mark.parametrize("tier", TIERS)
def test_accumulators_stay_in_registers(tier: str) -> None:
    names = f"{STEPS}|small_group_(slide|sums)<"
    if not tier.startswith("avx2"):  # its 16 registers cannot hold a window of columns
        names += "|Slide(Five)?<.*half<|SlidePairs<.*::run|dot_pixels<"
    tiles = {
        # A stream's loop lies in that of a piece.
        name: [*chain(*k_loops(body))] if "rnn_streamed_panel" in name else k_loop(name, body)
        for name, body in tier_functions(tier).items()
        if re.search(names, name)
    }
    assert len(tiles) >= 12, "the tiles were not found"
    windows = [name for name in tiles if re.search("small_group_(slide|sums)<", name)]
    assert len(windows) == (24 if tier == "avx512_vnni" else 0)
    assert all(tiles.values()), "a tile has no K loop"
    found = {name: spills(loop) for name, loop in tiles.items() if spills(loop)}
    stores = {
        name: sum(bool(STORE_TO_STACK.search(i)) for i in lines) for name, lines in found.items()
    }
    assert all(count <= ALLOWED.get(tier, 0) for count in stores.values()), found


@needs_objdump
@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier.endswith("_vnni")])
def test_accumulators_do_not_change_registers(tier: str) -> None:
    """GCC 12 moved up to six of them a step in recurrent tiles of three and four panels."""
    moves = {
        name: [i for i in k_loop(name, body) if MOVE.search(i)]
        for name, body in tier_functions(tier).items()
        if re.search(STEPS, name)
    }
    assert not any(moves.values()), {name: lines for name, lines in moves.items() if lines}


@needs_objdump
@pytest.mark.skipif("avx512_vnni" not in TIERS, reason="no such CPU")
def test_addresses_do_not_wait_for_products() -> None:
    """GCC 12 kept what no general register was left for in a vector register: 8 x 3 tiles took 1.04
    of the time on Zen 4, where moves from there take the place of a product."""
    names = STEPS.replace("|small_group", "")  # these have no register to spare
    parked = {
        name: lines
        for name, body in tier_functions("avx512_vnni").items()
        if re.search(names, name) and (lines := [i for i in k_loop(name, body) if PARKED.search(i)])
    }
    assert not parked


def behind_products(body: list[tuple[int, str]]) -> list[str]:
    """Returns the lines from the last dot product to the choice of an epilogue, a jump forward."""
    last = max(i for i, (_, text) in enumerate(body) if DOT.search(text))
    lines = []
    for address, text in body[last + 1 :]:
        jump = re.match(r"j(?!mp)\w+\s+([0-9a-f]+)", text)
        if jump and int(jump[1], 16) > address:
            break
        lines.append(text)
    return lines


@needs_objdump
@pytest.mark.skipif("avx512_vnni" not in TIERS, reason="no such CPU")
def test_ends_of_tiles_find_sums_in_registers() -> None:
    """GCC 12 spilled 16 of 24 in front of all ends of a tile."""
    tiles = {
        name: spills(behind_products(body))
        for name, body in tier_functions("avx512_vnni").items()
        if "gemm_tile<" in name and any(DOT.search(text) for _, text in body)
    }
    assert len(tiles) >= 100, "the tiles were not found"
    assert not {name: lines for name, lines in tiles.items() if lines}


@needs_objdump
@pytest.mark.skipif("avx512_vnni" not in TIERS, reason="no such CPU")
def test_pipelined_tiles_store_their_sums_once() -> None:
    """Stores between the products are unrolled, and no other tiles spill."""
    stores = {
        name: sum("zmm" in text for text in spills([text for _, text in body]))  # xmm: addresses
        for name, body in tier_functions("avx512_vnni").items()
        if "pipelined_tiles<" in name
    }
    assert len(stores) == 16, "the tiles were not found"
    for name, count in stores.items():
        assert count <= (16 + 6 if "Vnni, 4," in name else 0), (name, count)


@needs_objdump
def test_a_spill_is_found(tmp_path: Path) -> None:
    """Negative control: 40 accumulators do not fit 32 registers."""
    source = tmp_path / "spill.cpp"
    source.write_text(
        """
        #include <immintrin.h>
        void tile(const char* a, const char* b, long k, __m512i* out) {
          __m512i acc[40] = {};
          for (long i = 0; i < k; ++i) {
            const __m512i w = _mm512_loadu_si512(b + 64 * i);
        #pragma GCC unroll 64
            for (int j = 0; j < 40; ++j)
              acc[j] = _mm512_add_epi32(
                  acc[j], _mm512_madd_epi16(_mm512_set1_epi32(((const int*)a)[40 * i + j]), w));
          }
        #pragma GCC unroll 64
          for (int j = 0; j < 40; ++j) out[j] = acc[j];
        }
        """
    )
    target = tmp_path / "spill.o"
    command = ["g++", "-O3", "-mavx512f", "-mavx512bw", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    (loop,) = [loop for name, body in disassemble(target).items() if (loop := k_loop(name, body))]
    assert spills(loop)
