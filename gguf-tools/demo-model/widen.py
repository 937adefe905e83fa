#!/usr/bin/env python3
"""Gives a small trained model experts of any size, to measure with: widen.py models/demo.gguf 8192 demo-wide.gguf

An expert's hidden layer gets more units with zero weights. Its function stays the same, so routers choose as
trained, but its bytes and multiplications are those of a larger expert. Models with random weights do not route
like trained ones. For models whose layers all have experts; shared experts are widened only where they have no
width of their own."""
import argparse, os
import numpy as np
import gguf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("ff", type=int, help="units of an expert's hidden layer, a multiple of its type's block")
parser.add_argument("output")
parser.add_argument("--type", type=str.upper, choices=["F32", "F16", "Q8_0", "Q4_0"],
                    help="type of the experts [default: the model's]")
args = parser.parse_args()
if os.path.exists(args.output):
    parser.error(f"{args.output} exists")

model = gguf.GGUFReader(args.model)
arch = model.fields["general.architecture"].contents()
number = lambda key: model.fields[f"{arch}.{key}"].contents() if f"{arch}.{key}" in model.fields else None
width = "expert_feed_forward_length" if number("expert_feed_forward_length") else "feed_forward_length"
shared = number("expert_shared_count") if number("expert_shared_feed_forward_length") is None else None


def widened(tensor):
    """The tensor's rows with zeros behind them. Zero bytes decode to zero in all of ggml's types."""
    stem = tensor.name.removesuffix(".weight").split(".")[-1]
    if stem.endswith("_shexp") and shared:
        ff, stem = args.ff * shared, stem.removesuffix("_shexp")
    elif stem.endswith("_exps"):
        ff, stem = args.ff, stem.removesuffix("_exps")
    elif stem in ("ffn_gate", "ffn_up", "ffn_down") and width == "feed_forward_length":
        parser.error(f"{tensor.name} is a dense layer's, whose width has the same key")
    else:
        return tensor.data
    data = np.asarray(tensor.data)
    if stem == "ffn_down":  # a unit is a column
        block, bytes_of_block = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row = ff // block * bytes_of_block // data.itemsize
        fits, more = ff % block == 0, row - data.shape[-1]
        padding = [(0, 0)] * (data.ndim - 1) + [(0, more)]
    else:  # a unit is a row, or one of each half
        if stem == "ffn_gate_up":
            data = data.reshape(*data.shape[:-2], 2, data.shape[-2] // 2, data.shape[-1])
        fits, more = True, ff - data.shape[-2]
        padding = [(0, 0)] * (data.ndim - 2) + [(0, more), (0, 0)]
    if more < 0 or not fits:
        parser.error(f"{tensor.name}: {ff} is less than it has, or no multiple of its type's block")
    data = np.pad(data, padding)
    return data.reshape(*data.shape[:-3], -1, data.shape[-1]) if stem == "ffn_gate_up" else data


writer = gguf.GGUFWriter(args.output, arch)
for field in model.fields.values():
    kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
    if not field.name.startswith(("GGUF.", "general.architecture", "split.")):
        value = args.ff if field.name == f"{arch}.{width}" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=sub)
for tensor in model.tensors:
    if tensor.name.endswith("exps.weight") and args.type:
        tensor = tensor._replace(
            tensor_type=gguf.GGMLQuantizationType[args.type],
            data=gguf.quants.quantize(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type), gguf.GGMLQuantizationType[args.type]
            ),
        )
    writer.add_tensor(tensor.name, widened(tensor), raw_dtype=tensor.tensor_type)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
