"""Every value of a CoreML model, whether it is in the message or in a weight file."""

import struct

import numpy as np


def each_value(message, path=""):
    """(path, Value) of every MIL Value anywhere in a message; the order of maps does not matter."""
    if message.DESCRIPTOR.name == "Value" and message.DESCRIPTOR.file.name.endswith("MIL.proto"):
        yield path, message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        at = f"{path}/{field.name}"
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in sorted(value):
                    yield from each_value(value[key], f"{at}[{key}]")
        elif hasattr(value, "DESCRIPTOR"):
            yield from each_value(value, at)
        else:
            for index, part in enumerate(value):
                yield from each_value(part, f"{at}[{index}]")


PACKED = {"floats": np.float32, "ints": np.int32, "longInts": np.int64, "doubles": np.float64, "bools": np.uint8}


def constants(spec, weights_dir) -> dict[str, tuple[int, bytes]]:
    """The type and bytes of every tensor of a model by its path; the same for a tensor in a file and in the message."""
    found, files = {}, {}
    for path, value in each_value(spec):
        kind = value.WhichOneof("value")
        path = path.replace("/immediateValue/tensor", "")
        if kind == "blobFileValue":
            name = value.blobFileValue.fileName.removeprefix("@model_path/weights/")
            if name not in files:
                files[name] = (weights_dir / name).read_bytes()
            data, at = files[name], value.blobFileValue.offset
            sentinel, code, size, offset, padding = struct.unpack_from("<IIQQQ", data, at)
            assert sentinel == 0xDEADBEEF and offset + size <= len(data), f"{path}: no blob at {at}"
            found[path] = (value.type.tensorType.dataType, data[offset : offset + size])
        elif kind == "immediateValue" and value.immediateValue.WhichOneof("value") == "tensor":
            tensor = value.immediateValue.tensor
            form = tensor.WhichOneof("value")
            if form == "strings":
                data = b"\0".join(text.encode() for text in tensor.strings.values)
            elif form == "bytes":
                data = tensor.bytes.values
            elif form is None:
                data = b""
            else:
                data = np.array(getattr(tensor, form).values, PACKED[form]).tobytes()
            found[path] = (value.type.tensorType.dataType, data)
    return found
