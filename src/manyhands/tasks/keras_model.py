"""Keras 3 models, on its torch backend, as plain torch modules.

A Keras model keeps its variables, its mode and its random numbers to itself, and strategies know only torch.
So a module around it has the variables as its own parameters and buffers, and calls the model with them,
in a `StatelessScope`. Then

- `module.train()` counts: Keras by itself computes in inference mode unless it is told otherwise;
- parameters may be moved, shared or sharded, and copies of the module may share the Keras model;
- names do not depend on what was built before: Keras counts `dense`, `dense_1`, ... through a process;
- dropout draws its seeds from torch's generator, which each worker has for itself and a checkpoint holds;
- a model of float64 computes in float64: Keras on torch rounds every product to float32, as JAX does.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.generators import RandomStates

_BUILDING = threading.RLock()  # Keras has one floating-point type for all threads


def build(make: Callable[[], Any], name: str, dtype: torch.dtype) -> Any:
    """What a task's function builds, with torch modules in place of Keras models, which get this dtype."""
    before, known = RandomStates.now(), "keras" in sys.modules
    with _floating_point(dtype):
        made = make()
    if not known and _contains_keras(made):  # the function has imported Keras: now its dtype can be set
        before.restore()
        with _floating_point(dtype):
            made = make()
    if is_keras(made):
        return KerasModule(made, name)
    for parent, attribute, child in _keras_children(made):
        setattr(parent, attribute, KerasModule(child, name))
    return made


def plain(module: nn.Module) -> Any:
    """What the task's function had built: of a module around a Keras model, that model with its values."""
    return module.keras_model() if isinstance(module, KerasModule) else module


def is_keras(made: object) -> bool:
    """Whether it is a layer or a model of Keras; Keras need not be installed to know."""
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(made).__mro__)


def _contains_keras(made: object) -> bool:
    return is_keras(made) or bool(_keras_children(made))


def _keras_children(made: object) -> list[tuple[nn.Module, str, Any]]:
    """The Keras models that are attributes of torch modules."""
    parents = made.modules() if isinstance(made, nn.Module) and "keras" in sys.modules else ()
    return [
        (parent, attribute, child)
        for parent in parents
        if not is_keras(parent)
        for attribute, child in parent.named_children()
        if is_keras(child)
    ]


@contextmanager
def _floating_point(dtype: torch.dtype) -> Iterator[None]:
    """Inside, Keras builds models of this dtype, unless the user has chosen a policy."""
    if "keras" not in sys.modules:
        yield
        return
    import keras

    with _BUILDING:
        before, policy = keras.config.floatx(), keras.config.dtype_policy()
        kind = str(dtype).removeprefix("torch.")
        keras.config.set_floatx(kind)
        if policy.name in ("float32", "float64"):  # the usual one, not mixed
            keras.config.set_dtype_policy(kind)
        try:
            yield
        finally:
            keras.config.set_floatx(before)
            keras.config.set_dtype_policy(policy)


@contextmanager
def float64() -> Iterator[None]:
    """Inside, Keras does not round float64 to float32. It has no public switch for it."""
    if "keras" not in sys.modules:
        yield
        return
    import keras
    from keras.src.backend.common import dtypes

    rounds: dict[str, str] = getattr(dtypes, "BIT64_TO_BIT32_DTYPE", {})
    before, kind = rounds.get("float64", "float32"), keras.config.floatx()
    rounds["float64"] = "float64"
    keras.config.set_floatx("float64")  # the losses of Keras cast what they are given to it
    try:
        if keras.backend.result_type("float64", "float64") != "float64":
            raise UsageError(f"Keras {keras.__version__} computes in float32 only: leave out dtype float64")
        yield
    finally:
        rounds["float64"] = before
        keras.config.set_floatx(kind)


class _Held:
    """The Keras model and what belongs to it. Copies of a module share it: a call changes nothing in it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model._flatten_layers()
        self.weights = dict(zip(_names(model, self.layers), model.weights, strict=True))
        self._seeds = [(layer, seed.state) for layer in self.layers for seed in layer._seed_generators]

    @property
    def seeds(self) -> list[Any]:
        """The seeds that a call in training may draw from: a layer with the rate 0 draws none."""
        return [state for layer, state in self._seeds if getattr(layer, "rate", None) != 0.0]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


@final
class KerasModule(nn.Module):
    """A Keras model with its variables as parameters and buffers, by their paths: `dense/kernel`."""

    one_value = True  # its inputs are one value, of any structure

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        _check(model, name)
        self._held, self._task = _Held(model), name
        trained = {id(each) for layer in self._held.layers for each in layer._trainable_variables}
        for path, variable in self._held.weights.items():
            if id(variable) in trained:  # also if it is frozen
                self.register_parameter(path, variable.value)
            else:
                self.register_buffer(path, variable.value.detach().clone())

    def forward(self, *inputs: Any, training: bool | None = None, **others: Any) -> Any:
        """Call the Keras model with the tensors of this module, in the mode of this module."""
        import keras

        held, training = self._held, self.training if training is None else training
        tensors = {**self._parameters, **self._buffers}
        mapping: list[tuple[Any, Any]] = [
            (variable, tensors[path]) for path, variable in held.weights.items()
        ]
        if training:
            mapping += [(seed, torch.randint(2**31, tuple(seed.shape))) for seed in held.seeds]
        first = next((tensor for tensor in tensors.values() if tensor is not None), torch.empty(0))
        wide = float64() if first.dtype == torch.float64 else nullcontext()
        state = keras.StatelessScope(mapping, collect_losses=True)
        with keras.device(str(first.device)), wide, state as scope:
            outputs = held.model(*inputs, training=training, **others)
        if scope.losses:
            raise UsageError(_extra_losses(self._task, "add_loss"))
        if training:
            self._update_buffers(scope)
        return outputs

    def keras_model(self) -> Any:
        """The Keras model with the values of this module."""
        for path, variable in self._held.weights.items():
            variable.assign(self._tensor(path).detach())
        return self._held.model

    @property
    def batch_norms(self) -> list[Any]:
        """The layers that look at several samples of a batch at a time."""
        import keras

        return [each for each in self._held.layers if isinstance(each, keras.layers.BatchNormalization)]

    @property
    def dropouts(self) -> list[Any]:
        """The layers that drop units: those with a `rate`."""
        return [each for each in self._held.layers if isinstance(getattr(each, "rate", None), float)]

    @torch.no_grad()
    def _update_buffers(self, scope: Any) -> None:
        for path, buffer in self._buffers.items():
            value = scope.get_current_value(self._held.weights[path])
            if buffer is not None and value is not None and value is not buffer:
                buffer.copy_(value)

    def _tensor(self, path: str) -> Tensor:
        found = self._parameters[path] if path in self._parameters else self._buffers[path]
        assert found is not None
        return found


def _check(model: Any, name: str) -> None:
    import keras

    if keras.config.backend() != "torch":
        raise UsageError(
            f"the Keras model of {name} runs on {keras.config.backend()}, not on torch: set "
            "KERAS_BACKEND=torch before Keras is imported"
        )
    if not model.built or not model.weights:
        raise UsageError(
            f"the Keras model of {name} has no weights yet: begin it with keras.Input(shape), or call it "
            "once on a sample before it is returned"
        )
    if any(getattr(variable, "regularizer", None) is not None for variable in model.trainable_variables):
        raise UsageError(_extra_losses(name, "a regularizer"))
    if any(getattr(variable, "constraint", None) is not None for variable in model.trainable_variables):
        raise UsageError(
            f"the Keras model of {name} has constraints, which only the optimizers of Keras apply: leave "
            "them out, or compute them in the layer"
        )


def _extra_losses(name: str, what: str) -> str:
    return (
        f"the Keras model of {name} adds losses of its own ({what}), which a loss of outputs and targets "
        "does not have: use the weight decay of a recipe, or return the term as an output and add it in the "
        "loss"
    )


def _names(model: Any, layers: list[Any]) -> list[str]:
    """The paths of the weights, with automatic names numbered as if nothing had been built before."""
    numbers: Counter[str] = Counter()
    plain: dict[str, str] = {}
    for layer in layers:
        base = re.sub(r"_\d+$", "", layer.name)
        if base.replace("_", "") == type(layer).__name__.lower() and layer.name not in plain:
            plain[layer.name] = f"{base}_{numbers[base]}" if numbers[base] else base
            numbers[base] += 1
    found: list[str] = []
    for variable in model.weights:
        parts = [plain.get(part, part) for part in variable.path.split("/")]
        if len(parts) > 2 and variable.path.split("/")[0] == model.name:
            parts = parts[1:]
        path = "/".join(parts)
        found.append(path if path not in found else f"{path}_{len(found)}")
    return found
