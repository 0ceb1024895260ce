"""A gather as text that people can read and write, and back: ``float32[4096, 8]``.

A field is its dtype and its shape, the row count first. What follows is said only where it differs
from the plain case: ``stride 64``, bytes from row to row; ``alignment 2``, largest power of two (at
most 16) that divides the address; ``x 3``, so many such fields in a row.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import torch

from ..request import BOUNDS, INDEX_DTYPES, Field, Request, dtype_name, power_of_two_divisor

_INDICES = re.compile(r"(\w+)\[(\d+)\]")
_FIELD = re.compile(
    r"(\w+)\[(\d+(?:, ?\d+)*)\](?: stride (\d+))?(?: alignment (\d+))?(?: x (\d+))?"
)
# More than any launch or any tensor has; a text that says more is no gather.
MOST_FIELDS = 4096
MOST_ROWS = 2**62


def to_text(request: Request) -> dict[str, Any]:
    """The gather as a dict of text; fields whose rows are not contiguous are left out."""
    fields = [_field_text(field) for field in request.fields if field.contiguous_rows]
    groups = [(text, len(list(same))) for text, same in itertools.groupby(fields)]
    return {
        "indices": f"{dtype_name(request.index_dtype)}[{request.count}]",
        "bounds": request.bounds,
        "fields": [text if times == 1 else f"{text} x {times}" for text, times in groups],
    }


def from_text(shape: dict[str, Any], device: torch.device) -> Request:
    """The gather that `to_text` gave, on a device.

    Raises:
        ValueError: the text describes no gather; it names the part.
    """
    indices, bounds, texts = (shape.get(name) for name in ("indices", "bounds", "fields"))
    found = _INDICES.fullmatch(indices) if isinstance(indices, str) else None
    index_dtype = _dtype(found[1]) if found else None
    if not found or index_dtype not in INDEX_DTYPES or int(found[2]) > MOST_ROWS:
        raise ValueError(f'indices must be like "int64[48]", got {indices!r}')
    if bounds not in BOUNDS:
        raise ValueError(f"bounds must be one of {', '.join(BOUNDS)}, got {bounds!r}")
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"fields must be a list of texts, got {texts!r}")
    fields = [field for text in texts for field in _fields(text)]
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"a gather of {len(fields)} fields; there can be {MOST_FIELDS}")
    assert index_dtype is not None
    return Request(device, False, index_dtype, int(found[2]), bounds, tuple(fields))


def _field_text(field: Field) -> str:
    text = f"{dtype_name(field.dtype)}{[field.rows, *field.row_shape]}"
    if field.row_stride_bytes != field.row_bytes and field.rows > 1:
        text += f" stride {field.row_stride_bytes}"
    if field.alignment != 16:
        text += f" alignment {field.alignment}"
    return text


def _fields(text: Any) -> list[Field]:
    found = _FIELD.fullmatch(text) if isinstance(text, str) and len(text) < 1000 else None
    dtype = _dtype(found[1]) if found else None
    if not found or dtype is None:
        raise ValueError(f'a field must be like "float32[4096, 8]", got {text!r}')
    rows, *row_shape = (int(size) for size in found[2].split(","))
    row_bytes = dtype.itemsize * math.prod(row_shape)
    stride = int(found[3]) if found[3] else row_bytes
    alignment, times = int(found[4] or 16), int(found[5] or 1)
    if alignment != power_of_two_divisor(alignment):
        raise ValueError(f"alignment must be 1, 2, 4, 8 or 16, got {text!r}")
    if max(rows, rows * max(stride, row_bytes)) > MOST_ROWS or times > MOST_FIELDS:
        raise ValueError(f"a field larger than any memory: {text!r}")
    field = Field(dtype, rows, tuple(row_shape), row_bytes, stride, True, alignment)
    return [field] * times


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None
