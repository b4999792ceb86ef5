"""A model's weights as a stream of named tensors, on their own device and in their own dtype.

weights_of(model)      the stream of a model, with adapters merged, without copies
load_weights           copies a stream into the parameters of a model, in place
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from scalerl.rl.model.lora import merged_parameters, plain_parameters
from scalerl.rl.types import Plan, TensorSpec


@dataclass(frozen=True)
class WeightStream:
    """Weights that are read without a copy; see `scalerl.rl.types.Weights`.

    Values are those at the time of reading: a learner's stream must be read before its next step, and to its
    end, because every rank of a sharded learner takes part.
    """

    plan: Plan
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the stream of some tensors."""
        return cls(tuple(spec_of(*item) for item in tensors.items()), tensors.items)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors())


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the plan's entry for a tensor, with its own dtype or `dtype`."""
    return TensorSpec(name, tuple(tensor.shape), str(dtype or tensor.dtype).removeprefix("torch."))


def dtype_of_spec(spec: TensorSpec) -> torch.dtype:
    """Return the dtype that a plan's entry names."""
    return getattr(torch, spec.dtype)


def bytes_of(spec: TensorSpec) -> int:
    """Return the size of a tensor in bytes."""
    return spec.size * dtype_of_spec(spec).itemsize


def plan_of(model: nn.Module, dtype: torch.dtype | None = None) -> Plan:
    """Return the plan of a model's stream, with its parameters' dtypes or with `dtype`."""
    return tuple(spec_of(name, parameter, dtype) for name, parameter in plain_parameters(model))


def weights_of(model: nn.Module) -> WeightStream:
    """Return the parameters of a model as a stream; adapters are merged and tied parameters occur once."""
    return WeightStream(plan_of(model), lambda: ((n, p.detach()) for n, p in merged_parameters(model)))


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the parameters of `model`, in place.

    Raises:
        KeyError: the names are not those of `model`.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        # In place, because engines hold views of the parameters.
        parameters.pop(name).copy_(tensor)
    if parameters:
        raise KeyError(next(iter(parameters)))
