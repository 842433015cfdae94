"""What a training run is asked for, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from secateur import arguments
from secateur.errors import Argument, SecateurError
from secateur.plans.targets import brief
from secateur.recover.loss import Loss, check_share
from secateur.recover.schedule import CURVES
from secateur.results.history import Record
from secateur.running.batches import Data
from secateur.running.progress import Event
from secateur.running.targets import Reader

#: `f(images)` returns altered images; a transform of torchvision; or "crop-flip".
Augment = Callable[..., Any] | str
_USUAL: dict[str, Any] = {
    "epochs": 10, "optimizer": "sgd", "lr": 0.01, "batch_size": 64, "temperature": 4.0, "weight_decay": 5e-4,
    # The teacher's part grows with the square of what logits differ. Without a limit, one epoch can end at chance.
    "clip": 1.0,
}  # fmt: skip
_LANGUAGE: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 1e-4,
    "batch_size": 8,
    "temperature": 1.0,
    "weight_decay": 0.01,
    "clip": 1.0,
}


@dataclass(frozen=True, repr=False)
class Recover:
    """How a smaller model is trained until it is as good as the original: `prune(..., recover=Recover(epochs=20))`.

    The budget is `epochs`, or `minutes`, or both: then the run ends with the first. `teacher` is the original's share
    in the loss; the labels have the rest. Without labels the original is all, and with 0 it is not asked.
    `temperature` softens both answers. `blocks` weighs a further loss: the relative squared distance between what the
    blocks of both models return, with channels weighted by their relevance. `loss` is your own `f(output, targets)` for
    the labels.

    `optimizer` is "sgd" (with `momentum`) or "adamw". `schedule` moves the learning rate `lr`: "cosine", "onecycle" or
    "constant". `clip` is the largest norm of the gradient (1), 0 for any. `ema` is the decay of averaged weights, such
    as 0.999, which are then the result. What is None is decided by the kind of the model.

    `augment` alters images: a function of a batch, a transform of `torchvision.transforms.v2`, which is applied to each
    image (mixup and cutmix to the batch), or "crop-flip": shifted by up to an eighth and mirrored. `held_out` is the
    share of the samples that is not trained on; if training makes the loss on these larger, a warning says so. With
    `patience`, the run ends when it did not fall for so many epochs, and the result is the best epoch, or the model
    before training if no epoch is better.

    On CUDA, `mixed` computes in half precision. `channels_last` orders images as convolutions like them, also on a CPU,
    unless the model asks for the usual order, as `view` after convolutions mostly does. `compile` uses torch.compile,
    which takes a minute first. `lora` is the rank of adapters (by peft) that are trained instead of the weights, and
    then merged into them. `data` are the samples, if not those that `prune` is given. `seed` decides every random
    choice.

    >>> Recover(epochs=20, lr=0.05)
    Recover(epochs=20, lr=0.05)
    """

    epochs: int | None = None
    minutes: float | None = None
    lr: float | None = None
    optimizer: Literal["sgd", "adamw"] | None = None
    schedule: Literal["cosine", "onecycle", "constant"] = "cosine"
    batch_size: int | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    clip: float | None = None
    teacher: float = 0.9
    temperature: float | None = None
    blocks: float = 0.0
    loss: Loss | None = None
    ema: float = 0.0
    augment: Augment | None = None
    held_out: float = 0.0
    patience: int | None = None
    mixed: bool = True
    channels_last: bool = True
    compile: bool = False
    lora: int = 0
    data: Data = None
    seed: int = 0

    def __repr__(self) -> str:
        return brief(replace(self, data=None))

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) is not None:
                arguments.check_count(name, getattr(self, name))
        for name in ("lr", "minutes", "weight_decay", "clip", "temperature", "blocks"):
            if getattr(self, name) is not None:
                arguments.check_number(name, getattr(self, name), least=0)
        for name in ("teacher", "ema", "held_out", "momentum"):
            check_share(name, getattr(self, name))
        for name in ("ema", "held_out", "momentum"):
            if getattr(self, name) == 1:
                raise SecateurError("{given} leaves nothing.", fix="less than 1", given=Argument(name, 1))
        for name in ("mixed", "channels_last", "compile"):
            arguments.check_flag(name, getattr(self, name))
        arguments.check_choice("schedule", self.schedule, tuple(CURVES))
        arguments.check_choice("optimizer", self.optimizer, (None, "sgd", "adamw"))
        arguments.check_callable("loss", self.loss, "a function f(output, targets)")
        if isinstance(self.augment, str):
            arguments.check_choice("augment", self.augment, ("crop-flip",))
        else:
            arguments.check_callable("augment", self.augment, "'crop-flip', a transform of torchvision, or f(images)")
        arguments.check_count("lora", self.lora, 0)
        arguments.check_count("seed", self.seed, None)
        if self.minutes == 0 or self.temperature == 0:
            name = "minutes" if self.minutes == 0 else "temperature"
            raise SecateurError("{given} must be above 0.", given=Argument(name, 0))

    @classmethod
    def of(cls, given: Any) -> Recover | None:
        """Settings from what a user may give. A number is that of the epochs."""
        if given is None or isinstance(given, Recover):
            return given
        if isinstance(given, bool):
            return cls() if given else None
        if isinstance(given, int):
            return cls(epochs=given)
        fix = "a number of epochs, or a secateur.recover.Recover"
        raise SecateurError(f"recover is a {type(given).__name__}.", where="recover", value=given, fix=fix)

    @classmethod
    def scenario1(cls, data: Data = None, **changes: Any) -> Recover:
        """The training between the steps of the paper's Scenario 1: SGD on the labels alone, at a constant rate."""
        own = cls(
            epochs=10, lr=1e-3, optimizer="sgd", schedule="constant", batch_size=20, weight_decay=0.0, clip=0.0,
            teacher=0.0, channels_last=False, data=data,
        )  # fmt: skip
        return replace(own, **changes)

    @property
    def is_limited(self) -> bool:
        """Whether gradients cannot become large."""
        return self.clip is not None and 0 < self.clip <= 1

    def decided(self, model: nn.Module) -> Recover:
        """Decide what was left open."""
        usual = _USUAL | (_LANGUAGE if Reader(model).generates else {})
        if self.optimizer == "adamw":
            usual |= {name: _LANGUAGE[name] for name in ("lr", "weight_decay", "clip")}
        if self.minutes is not None:
            usual["epochs"] = None
        return replace(self, **{name: value for name, value in usual.items() if getattr(self, name) is None})


@dataclass(frozen=True)
class Epoch(Event):
    """One epoch of training. `accuracy` is that on the samples trained on, before each step; None if there are no
    labels, or targets that are no classes.

    `held_out` and `held_out_accuracy` are the loss and the accuracy on samples that are not trained on, if there are
    any. `lr` is the learning rate of its last step, and `seconds` the time since the beginning.

    >>> print(Epoch(2, 10, 0.25, 0.9, held_out=0.3, held_out_accuracy=0.88))
    recovering: epoch 2/10, in training loss 0.25, accuracy 90.0 %; held out: loss 0.3, accuracy 88.0 %
    """

    epoch: int
    epochs: int | None
    loss: float
    accuracy: float | None = None
    lr: float = 0.0
    held_out: float | None = None
    held_out_accuracy: float | None = None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        number = f"epoch {self.epoch}{f'/{self.epochs}' if self.epochs else ''}"
        text = f"recovering: {number}, in training loss {self.loss:.4g}{_percent(self.accuracy)}"
        if self.held_out is None:
            return text
        return f"{text}; held out: loss {self.held_out:.4g}{_percent(self.held_out_accuracy)}"


def _percent(share: float | None) -> str:
    return "" if share is None else f", accuracy {100 * share:.1f} %"


@dataclass(frozen=True)
class Recovered:
    """What a training run ended with: the model, its epochs, and why it ended.

    `result` is what was given, with this model, if that was the result of `prune`.
    """

    model: nn.Module
    history: tuple[Epoch, ...]
    stopped: str
    result: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<Recovered {type(self.model).__name__}: {len(self.history)} epochs; {self.stopped}>"


def model_of(given: nn.Module | Record) -> nn.Module:
    """The smaller model that a user means."""
    return given.model if isinstance(given, Record) else given
