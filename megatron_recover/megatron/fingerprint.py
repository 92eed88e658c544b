"""A hash of a rank's parameters, to prove that replicas are equal."""

from __future__ import annotations

from typing import Any

import torch
import xxhash


def hash_parameters(model: list[Any]) -> str:
    """Hex digest over the bytes of all parameters of all chunks, in order. Reads each parameter once."""
    digest = xxhash.xxh3_64()
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                flat = parameter.detach().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
