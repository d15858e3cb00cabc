# SPDX-License-Identifier: Apache-2.0
"""Emulates CPUs without VNNI under oneDNN's rules, and proves where results do not differ.

torchq's own results are exact on every CPU. This package answers, on any CPU, for weights and
models that also run elsewhere: there, u8 times s8 products are added in pairs that saturate to 16
bits (VPMADDUBSW), and

    u8 source   nothing is done: pairs saturate (convolutions, inner product, GEMM, RNN)
    s8 source   runs as u8 with +128, and 128 times the weight sums are subtracted;
                inner product, GEMM, RNN: pairs saturate
                convolutions: the weights are halved, ``rne(w * 0.5)``, and the result doubled:
                no pair saturates, but odd weights lose half a step

Pairs are consecutive k within a tap: (0, 1), (2, 3), ... So do the vector kernels of oneDNN 3.2,
told to use no VNNI, and the accumulators here equal theirs in every bit (a test, where its wheels
can be had). Shapes that oneDNN gives to its reference loops are exact there, and a grouped
transposed convolution that it gives to its GEMM is not protected; a layout that pairs other k
saturates elsewhere.
"""

from torchq.onednn.saturation.pairs import (
    Sums,
    emulate_conv,
    emulate_conv_transpose,
    emulate_linear,
    halve,
)
from torchq.onednn.saturation.proof import Proof, prove, seven_bits
from torchq.onednn.saturation.recurrent import Tally, emulate_recurrent
from torchq.onednn.saturation.report import LayerReport, Report, emulate, emulate_module

__all__ = [
    "LayerReport",
    "Proof",
    "Report",
    "Sums",
    "Tally",
    "emulate",
    "emulate_conv",
    "emulate_conv_transpose",
    "emulate_linear",
    "emulate_module",
    "emulate_recurrent",
    "halve",
    "prove",
    "seven_bits",
]
