# SPDX-License-Identifier: Apache-2.0
"""Shows what quantization did to a model: accuracy and time by layer, sensitivity, reports.

prepared = torchq.calibrate(torchq.prepare(model, inputs), data)
qmodel = torchq.convert(prepared)
print(torchq.explain(qmodel))                     # what runs in int8, and why not the rest
print(torchq.compare(prepared, qmodel, data))     # SQNR of every layer
print(torchq.profile(model, qmodel, inputs))      # float and int8 time of every layer
torchq.sensitivity(model, data, inputs)           # which layers hurt, which are worth keeping
torchq.tune(model, data, evaluate, max_drop=0.005)   # the first recipe that is good enough
torchq.write_report("report.html", model, prepared, qmodel, data)
"""

from torchq.analysis.accuracy import Accuracy, LayerAccuracy, compare, sqnr
from torchq.analysis.budget import Trial, Tuned, tune
from torchq.analysis.explanation import Explanation, GraphRow, InputRow, explain
from torchq.analysis.html import write_report
from torchq.analysis.sensitivities import Sensitivities, Sensitivity, sensitivity
from torchq.analysis.speed import LayerTime, Profile, profile
from torchq.analysis.statistics import load_calibration, save_calibration
from torchq.analysis.timing import Speedup, Times, measure, milliseconds

__all__ = [
    "Accuracy",
    "Explanation",
    "GraphRow",
    "InputRow",
    "LayerAccuracy",
    "LayerTime",
    "Profile",
    "Sensitivities",
    "Sensitivity",
    "Speedup",
    "Times",
    "Trial",
    "Tuned",
    "compare",
    "explain",
    "load_calibration",
    "measure",
    "milliseconds",
    "profile",
    "save_calibration",
    "sensitivity",
    "sqnr",
    "tune",
    "write_report",
]
