"""Weights as arrays, to compare."""

import numpy as np
import torch

from scalerl.rl.model.weights import WeightStream


def arrays(weights):
    """Copies by name, in float32."""
    return {name: weight.detach().cpu().float().numpy().copy() for name, weight in weights}


def stream(arrays_by_name):
    """Weights of these arrays."""
    return WeightStream.of({name: torch.tensor(np.asarray(array)) for name, array in arrays_by_name.items()})
