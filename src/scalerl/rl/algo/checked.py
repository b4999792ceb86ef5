"""Checked calls of a recipe's choices, as a custom class may return anything.

NumPy would broadcast an array of a wrong shape, and the run would silently train on it. Results are checked
once before training starts (`try_...`), and at every call during a run.

Shapes in names: G completions of one group, N completions of a batch, T tokens.
"""

from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.errors import OwnCodeError, ScalerlError, brief, brief_error
from scalerl.rl.algo.advantage import Advantage
from scalerl.rl.algo.averaging import Averaging
from scalerl.rl.algo.curriculum import Curriculum, History
from scalerl.rl.algo.length import ForcedInterruption, LengthControl
from scalerl.rl.algo.loss import Loss, TokenLoss


def weights_of(averaging: Averaging, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
    """Return the weight of a token of each completion, (N,).

    Raises:
        OwnCodeError: the averaging raises, or does not return N finite numbers, none negative and not all 0.
    """
    name = f"averaging: {type(averaging).__name__}"
    weight_N = _numbers(_call(name, averaging, length_N, group_N, budget), (len(length_N),), name)
    if (weight_N < 0).any() or not weight_N.any():
        what = "a negative weight" if (weight_N < 0).any() else "no weight above 0"
        raise OwnCodeError(f"{name} returns {what}: return what each token of each completion weighs, (N,)")
    return weight_N


def advantages_of(advantage: Advantage, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the advantages of each group, (G,) each, from its centred rewards; an empty list for no groups.

    Raises:
        OwnCodeError: the advantage raises, or does not return an array of finite numbers for each group.
    """
    if not centred:
        return []
    name = f"advantage: {type(advantage).__name__}"
    found = _call(name, advantage, centred)
    if not isinstance(found, list | tuple) or len(found) != len(centred):
        what = f"{len(found)} arrays" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
        raise OwnCodeError(f"{name} returns {what} for {len(centred)} groups: return a list of one for each")
    return [_numbers(a_G, before_G.shape, name) for a_G, before_G in zip(found, centred, strict=True)]


def loss_of(loss: Loss, *arguments: Tensor) -> TokenLoss:
    """Return the result of a loss.

    Raises:
        OwnCodeError: the loss raises.
    """
    return _call(f"loss: {type(loss).__name__}", loss, *arguments)


def penalty_of(control: LengthControl, length: int, correct: bool) -> float:
    """Return what a length control adds to the reward of a completion.

    Raises:
        OwnCodeError: the length control raises, or does not return a finite number.
    """
    name = f"length: {type(control).__name__}: penalty"
    return float(_numbers(_call(name, control.penalty, length, correct), (), name))


def retires(curriculum: Curriculum, history: History) -> bool:
    """Return whether a curriculum retires a prompt.

    Raises:
        OwnCodeError: the curriculum raises, or does not return a boolean.
    """
    name = f"curriculum: {type(curriculum).__name__}: retires"
    found = _call(name, curriculum.retires, history)
    if not isinstance(found, bool | np.bool_):
        raise OwnCodeError(f"{name} returns {brief(found)}: return True or False")
    return bool(found)


def try_averaging(averaging: Averaging) -> None:
    """Call an averaging on a group of two completions and one of one."""
    weights_of(averaging, np.array([3.0, 2.0, 5.0]), np.array([0, 0, 1]), 8)


def try_advantage(advantage: Advantage) -> None:
    """Call an advantage on a group of three completions and one of two."""
    advantages_of(advantage, [np.array([1.0, -0.5, -0.5]), np.array([1.0, -1.0])])


def try_length(control: LengthControl) -> None:
    """Call the methods of a length control."""
    for length, correct in ((1, True), (2, False)):
        penalty_of(control, length, correct)
    name = f"length: {type(control).__name__}: interruption"
    found = _call(name, control.interruption)
    if not isinstance(found, ForcedInterruption | None):
        raise OwnCodeError(f"{name} returns {brief(found)}: return a ForcedInterruption, or None")


def try_curriculum(curriculum: Curriculum) -> None:
    """Call a curriculum on a prompt without correct completions, and on one with some."""
    for correct in (0, 3):
        retires(curriculum, History(correct, 4, (correct, 4)))


def try_loss(loss: Loss) -> None:
    """Call a loss on two completions of three and two tokens.

    Raises:
        OwnCodeError: it raises, or its result has a wrong type or shape, no gradient or no finite value.
    """
    sampled_NT = torch.tensor([[True, True, True], [True, True, False]])
    logp_NT = torch.where(sampled_NT, -1.0, 0.0).requires_grad_()
    name = f"loss: {type(loss).__name__}"
    found = _call(name, loss, logp_NT, logp_NT.detach().clone(), torch.tensor([1.0, -1.0]), sampled_NT)
    if not isinstance(found, TokenLoss):
        raise OwnCodeError(f"{name} returns a {type(found).__name__}: return TokenLoss(value_NT, clipped_NT)")
    for field, value in found._asdict().items():
        shape = tuple(getattr(value, "shape", ()))
        if not isinstance(value, Tensor) or shape != logp_NT.shape:
            what = f"of shape {shape}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            needed = "a tensor of the shape (N, T) of logp_NT is needed"
            raise OwnCodeError(f"{name}: {field} is {what}: {needed}")
    if found.clipped_NT.dtype != torch.bool:
        raise OwnCodeError(f"{name}: clipped_NT holds {found.clipped_NT.dtype}: booleans are needed")
    if not found.value_NT.requires_grad:
        raise OwnCodeError(f"{name}: value_NT has no gradient: it must depend on logp_NT without detach()")
    _numbers(found.value_NT.detach().numpy(), tuple(logp_NT.shape), name)


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ScalerlError:
        raise
    except (Exception, SystemExit) as error:
        where = extract_tb(error.__traceback__)[-1]  # as the user sees one line instead of a traceback
        what = f"raised an error ({brief_error(error)}) at {where.filename}:{where.lineno}"
        raise OwnCodeError(f"{name} {what}") from error


def _numbers(found: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return `found`, the result of `name`, as an array of finite numbers of this shape."""
    try:
        numbers = np.asarray(found)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that requires grad
        numbers = np.array(None)
    if numbers.dtype.kind not in "biuf":
        raise OwnCodeError(f"{name} returns {brief(found)}: numbers are needed")
    if numbers.shape != shape:
        raise OwnCodeError(f"{name} returns numbers of shape {numbers.shape}: {shape} is needed")
    if (odd := numbers[~np.isfinite(numbers)]).size:
        raise OwnCodeError(f"{name} returns {odd[0]}: finite numbers are needed")
    return numbers.astype(float, copy=False)
