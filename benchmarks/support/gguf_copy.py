"""A copy of a GGUF model with its matrices in another format and everything else unchanged."""

from pathlib import Path

import gguf
import numpy as np

_WRITTEN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def requantised(source: Path, target: Path, kind: str) -> Path:
    """Write `source` to `target` with all matrices as `kind`, such as Q8_0, unless it exists; vectors stay f32."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    reader, quantised = gguf.GGUFReader(source), getattr(gguf.GGMLQuantizationType, kind)
    writer = gguf.GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name not in _WRITTEN:
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[1:2] and field.types[-1])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
