# SPDX-License-Identifier: Apache-2.0
"""Why something stays float, and what else a row of a report says: every such sentence.

Those with braces are completed by ``format``. A new sentence is a constant here, which the code
that decides reads as ``reasons.NAME``.
"""

# The caller, and the model's own code
OVERRIDE = "kept float by an override"
NOT_CALLED = "not called with example_inputs"
READ = "its parameters are used outside of it, and it is not called"
OWN_CALL = "the model's own code calls it, which gets and gives float32"
OTHER_ARGUMENTS = "called with other arguments than its source"
OTHER_CODE = "the model's code does something else with another kind of layer"
NO_LEAF = "only leaf modules of torch.nn and torchq.nn have an int8 form"
OWN_EXPERTS = "its experts have an activation with parameters, which has no int8 form"
OWN_RECURRENT = "it is a recurrent module with code of its own, which has no int8 form"
SCRIPTED = "TorchScript compiled it: quantize first, then script the result"
ONCE = "nothing that it reads depends on the inputs: it is computed once"
OWN_CODE = "its code is its own"
LEFT_OUT = "qconfig_spec leaves it out"
SAME_WEIGHT = "another module has the same weight"
READ_WEIGHT = "nn.MultiheadAttention reads its weight"
NOT_CONVERTED = "modules_to_not_convert, or transformers itself, keeps it float"
FLOAT_IN_FILE = "float in the saved model"
FLOAT_IN_FOLDER = "float in the folder"
FLOAT_BEFORE = "it was float in the model that this one comes from"

# Dtypes and shapes
SOURCE_DTYPE = "its source is {dtype}, not torch.float32, torch.bfloat16 or torch.float16"
RESULT_DTYPE = "its result is {dtype}, not torch.float32, torch.bfloat16 or torch.float16"
NO_TENSOR = "it returns no tensor"
NO_BATCH = "its source {shape} has no batch dimension"
POSITIONS = "it reads what depends on sizes and positions alone"
CONSTANT_SOURCE = "its source is a constant"

# Forms that int8 lacks
NO_FORM = "{what} has no int8 form"
UNKNOWN = "it has no int8 form"
NO_DYNAMIC_FORM = "only linear layers, recurrent ones and attention have a dynamic form"
NO_OWN_DYNAMIC_FORM = "it has no dynamic form"
SLOW_DEPTHWISE = (
    "a dynamic depthwise convolution would be slower than float; give its name to have it"
)
OPTIONS = "its options have no int8 form"
OPERAND = "an operand is not a tensor"
NUMBER_OF_SIZES = "a number that depends on the input's sizes has no int8 form"
OF_TWO = "{function} of two tensors has no int8 form"
NOT_FINITE = "its constant is not finite"
AT_RUN_TIME = "its {argument} is computed at run time"
NOT_LISTED = "its sources are not listed one by one"
TENSOR_BOUNDS = "its bounds are tensors"
PARTIAL_MEAN = "a mean other than over all spatial dims has no int8 form"
ALIGNED_CORNERS = "interpolation with align_corners=True has no int8 form"
FRACTIONS = "interpolation by {factors} has no int8 form, only by whole numbers"
PADDING = "padding with anything but constant zeros has no int8 form"
UNFOLD = "PyTorch's unfold takes no uint8 tensor"
ELU_SCALES = "its scales have no int8 form"
BATCH_STATISTICS = "it takes the statistics of each batch"
ALONE_ON_ROWS = "it stands alone on rows of features"
CHANNEL_SLOPES = "it has a slope per channel, and no convolution or linear in front takes it over"
TABLE = "embedding_bits of its QConfig is not set"

# Products
VECTOR_WEIGHT = "its weight is a vector"
VECTOR = "an operand is a vector"
CONSTANT_MATRIX = "its matrix is a constant"
ADDED_ROWS = "what it adds differs from row to row"
INNER = "an inner product without a constant matrix on its right has no int8 form"
TENSORDOT = "a tensordot that is no linear layer of a constant matrix has no int8 form"
EINSUM = "an einsum that is no product of two matrices has no int8 form"
BILINEAR = "its weight multiplies two tensors"
SEVERAL_MATRICES = "a product of several matrices has no int8 form"
CHOSEN_MATRIX = "which of its matrices a row is multiplied by is known at run time only"
DROPOUT = "it drops at random"
ATTENTION_SCALE = "its scale {scale} is not above 0"
MASK_DTYPE = "its mask is {dtype}, neither float32, bfloat16, float16 nor bool"
CACHED = "it reads keys or values that a cache keeps in float"
GROWS = "a cache keeps its keys or values in float"
CACHED_8 = "it reads keys and values that a cache keeps in 8 bits"
GROWS_8 = "a cache keeps its keys or values in 8 bits"
NOT_8 = (
    "a cache keeps its keys or values in float: 8 bits need PyTorch's attention with a mask of "
    "bool or float32"
)
NO_CACHE = "cache_bits has no effect: no graph takes calls with a cache of keys and values"
ROTARY = "it turns queries or keys by their positions, in one operation of float32"

# Sums that an int32 may not hold
TOO_LONG = "it sums more than {products} products, which could overflow int32"
KEYS = "it has more than {keys} keys, whose sums could overflow int32"
WINDOW = "its window has more than {positions} positions, whose sum could overflow int32"

# What 8 bits are too coarse for
SCORES = "8 bits of the scores are too coarse for their exponentials"
NEAR_ZERO = "8 bits near zero are too coarse for its slope there"
LENGTH = "the range of what it reads depends on sizes of the input"
WEIGHTS = "it reads weights of a softmax, most of which are small beside the largest"
VARIANCE = "8 bits of what it reads, often a sum, are too coarse for its variance"
PHASES = "8 bits of what it reads are too coarse for phases of up to {largest:.3g} behind"
ROWS = "with one scale, half of its source's rows have less than {decibels:.0f} dB"

# Fake quantizers
NO_LEVELS = "the model has a fake quantizer behind it, and none in front"
FAKE_FORM = "fake quantization of {dtype} by {granularity} has no int8 form"
FAKE_CHANNELS = "it has a scale per channel, and what reads activations takes one"
FAKE_LEVELS = "it has {levels} levels, and int8 has 256"
FAKE_AXIS = "its weight has scales along another dimension than its output channels"
FAKE_SCALE = "its weight's fake quantizer has no positive scale"
FAKE_ZERO = "zero is no level of its weight's fake quantizer"
FAKE_ZERO_POINT = "its weight's fake quantizer has a zero point that int8 cannot do without"

# What recipes did, and copies of a weight
SMOOTHED = "smoothing {alpha:g}: largest channel {largest:.3g}, median {median:.3g}, error {error}"
APART = (
    "{large} of {count} source channels apart: up to {largest:.3g}, others to {others:.3g}, error "
    "{error}"
)
ROUNDED = "smoothing {alpha:g}{more}, {before} -> {after}"
COPIES = "its weight has {count} int8 copies: {why}"
FACTORS = "channels of its source have factors"
BATCH_NORM = "a batch norm is in its integers"
EIGHT_BITS = "8 bits: its result would have {left:.1f} dB with 4, below min_sqnr={limit:g}"
EIGHT_UNSEEN = "8 bits: no calibration data reached it, so nothing tells what 4 would cost"
SAMPLED = "a sample of its source chose their rounding"
OTHER_SCALES = "its calls have other scales or bits"

# What is around it, and what else a row says
FLOAT_SOURCES = "its sources are float"
FLOAT_DESTINATION = "its destination is float"
ELSEWHERE = "{here}; elsewhere float: {why}"
FUSED = "fused into "
DYNAMIC = "dynamic: "
PASSES = "passes values on as they are"
CHANNELS_LAST = "faster than float from channels-last sources, slower from contiguous ones"
LEVELS = "says what the scale and zero point are"
