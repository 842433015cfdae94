"""The training loop: epochs of steps, averaged weights, held-out samples, checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from secateur.errors import Argument, DataError, FileFormatError, SecateurError, SecateurWarning, TrainingError
from secateur.nest import map_tensors, select_samples, tensors_in
from secateur.recover.blocks import Blocks
from secateur.recover.checkpoint import Checkpoint, random_state, set_random_state
from secateur.recover.loss import Objective, warn_of_quantities
from secateur.recover.norms import settle
from secateur.recover.recording import Recording
from secateur.recover.samples import Samples
from secateur.recover.schedule import CURVES, Budget
from secateur.recover.settings import Epoch, Recover
from secateur.running.batches import Data, check_inputs, is_pair, size_of
from secateur.running.copies import unwrap
from secateur.running.devices import device_of, full
from secateur.running.logits import logits_of
from secateur.running.processes import active, agree, gathered, in_step, same_everywhere, share, synchronise
from secateur.running.progress import Listener
from secateur.running.sandbox import evaluating, refusal, run, spoilt
from secateur.running.targets import Reader, check_targets

# A file is written after an epoch if that takes no more than this share of the time.
_WRITING = 0.1
# Steps between two looks at the loss.
_LOOK = 100
# By which share of itself a loss on held-out samples must be larger than before training to be worth a warning.
_CLEARLY = 0.1


class Trainer:
    """Trains `student` in place. `teacher`, in evaluation mode, answers the same batches; None if it is not asked."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module | None, samples: Samples, settings: Recover, *,
        blocks: Blocks | None = None, reader: Reader | None = None, tell: Listener = lambda event: None,
        file: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self.student, self.teacher, self.samples, self.settings = student, teacher, samples, settings
        self._blocks, self._tell, self._file = blocks, tell, file
        self._parameters = [p for p in student.parameters() if p.requires_grad]
        if not self._parameters:
            raise DataError("every parameter is frozen (requires_grad=False): there is nothing to train.")
        # By name, since a forward may put another tensor in the place of a buffer.
        self._buffers = _places(student)
        self._average = [t.detach().clone() for t in self._moving] if settings.ema else []
        self._device = device_of(student)
        self._cuda = self._device is not None and self._device.type == "cuda"
        self._mixed = settings.mixed and self._cuda
        self._half = torch.bfloat16 if self._mixed and torch.cuda.is_bf16_supported() else torch.float16
        self._scaler = torch.amp.GradScaler("cuda", enabled=self._mixed and self._half is torch.float16)
        self._optimizer = _optimizer(self._parameters, settings)
        self._objective = Objective(
            reader or Reader(student), settings.teacher, settings.temperature or 1.0, settings.loss
        )
        self._net: nn.Module = student
        self._compiled: tuple[Any, nn.Module, nn.Module | None] | None = None
        #: Targets are checked. That asks the device for numbers, so it is done in the first epoch only.
        self._unchecked = True
        self._taken = 0
        self._budget = Budget(settings.epochs, settings.minutes)
        #: The loss on held-out samples before training, and the weights of the best epoch.
        self._before: float | None = None
        self._best: list[Tensor] = []
        self._good = self._snapshot()
        self.history: list[Epoch] = []
        self.stopped = ""

    # -- the run -------------------------------------------------------------------------------------------------------
    def run(self) -> str:
        """Train until the budget is spent, or held-out samples say that it is enough. Returns why it ended."""
        if not self._restore():
            self._begin()
        written, cost = time.perf_counter(), 0.0  # when the file was written, and the seconds that it took
        with self._training() as gradients:
            while not self.stopped:
                self._epoch(gradients)
                self._after_epoch()
                begin = time.perf_counter()
                cheap = cost <= _WRITING * (begin - written)
                if self._file is not None and same_everywhere(cheap or bool(self.stopped)):  # all write, or none
                    self._save()
                    written = time.perf_counter()
                    cost = written - begin
        self._finish()
        return self.stopped

    @contextmanager
    def _training(self) -> Iterator[Recording]:
        """Training mode, gradients and hooks; afterwards all flags are as before."""
        flags = [(module, module.training) for module in self.student.modules()]
        self.student.train()
        if active():
            net: Any = torch.compile(self.student) if self.settings.compile else self.student
            place = [self._device.index] if self._cuda and self._device else None
            # A head that only helps in training has no gradient here.
            self._net = nn.parallel.DistributedDataParallel(net, device_ids=place, find_unused_parameters=True)
        alone = self._cuda and not active() and not self._scaler.is_enabled()
        asked = [part for part in (self.student, self.teacher, self.settings.loss) if part is not None]
        recording = Recording(self._gradients, self._parameters, asked, alone)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
                if self._blocks is not None:
                    stack.enter_context(self._blocks)
                yield recording
        finally:
            recording.close()
            self._net, self._compiled = self.student, None
            for parameter in self.student.parameters():
                parameter.grad = None
            for module, flag in flags:
                module.training = flag

    def _epoch(self, gradients: Recording) -> None:
        number, drawn = len(self.history), same_everywhere(torch.get_rng_state()) if active() else None
        length = min(gathered(self.samples.length or 0))
        sums, steps, rate, done = self._sums(), 0, 0.0, 0.0
        for inputs, targets in in_step(self.samples.epoch(drawn, number)):
            done = self._budget.done(number + (steps / length if length else 0.0))
            if done >= 1 and (steps or number):
                break  # the minutes are over
            rate = self._set_rate(done)
            try:
                numbers = (self._gradients if self._unchecked else gradients)(inputs, targets)
            except torch.OutOfMemoryError:
                self._refuse_size(self._gradients, inputs, targets, self.samples.data)
            self._step()
            sums += numbers
            steps += 1
            if steps % _LOOK == 0:
                self._check_finite(float(sums[0]), number, steps)
        if not steps and done < 1:
            fix = "a list of batches, or a loader that can be read again" if number else ""
            raise DataError(f"there is no batch to train on{' a second time' if number else ''}.", fix=fix)
        self._unchecked = False
        if steps:
            synchronise(self.student, self._average)  # batch norm statistics are each process's own
            loss, right, known = sums.tolist()
            # A step can spoil weights although the loss before it was finite.
            self._check_finite(loss if spoilt(self.student) is None else math.nan, number, steps)
            totals = [sum(part) for part in zip(*gathered([loss, right, known, float(steps)]), strict=True)]
            accuracy = _share(totals[1], totals[2])
            held, held_accuracy = self._held_out()
            self.history.append(
                Epoch(number + 1, self.settings.epochs, totals[0] / totals[3], accuracy, rate, held, held_accuracy,
                      self._budget.seconds)
            )  # fmt: skip
            self._tell(self.history[-1])
        self._good = self._snapshot()

    def _after_epoch(self) -> None:
        """Whether it is enough."""
        patience = self.settings.patience
        losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in self._held_losses()]
        if patience is not None and self.history:
            least = min(losses)
            if losses[-1] == least:
                self._best = self._snapshot()
            if least not in losses[-patience:]:
                best = losses.index(least)
                which = f"this is epoch {best}" if best else "this is the model before training"
                self.stopped = f"the loss on held-out samples did not fall for {patience} epochs; {which}"
                return
        if self._budget.done(len(self.history)) >= 1:
            by_time = self.settings.epochs is None or len(self.history) < self.settings.epochs
            self.stopped = "the minutes are over" if by_time else "all epochs are done"

    def _finish(self) -> None:
        """Leave the weights that are the result in the student: those of the best epoch, and averaged if asked for."""
        self._load(self._best or self._good)
        before, *after = self._held_losses()
        last = after[-1] if after else None
        if not self._best and before is not None and last is not None and last - before > _CLEARLY * abs(before) + 0.01:
            warning = SecateurWarning(
                "training raised the loss on held-out samples from {before} to {after}.",
                fix="a smaller {lr}, or patience=3, which keeps the best", before=f"{before:.4g}",
                after=f"{last:.4g}", lr=Argument("lr", self.settings.lr),
            )  # fmt: skip
            warnings.warn(warning, stacklevel=2)

    def _held_losses(self) -> list[float | None]:
        """The losses on held-out samples: before training, and after each epoch."""
        return [self._before, *(row.held_out for row in self.history)]

    def _begin(self) -> None:
        """Batch norms learn what they divide by, which changes no answer. Then a look at the model before training."""
        if agree(flag=settle(self.student, self.samples, self.settings.seed, _learnt)):
            synchronise(self.student)  # each process has looked at its own samples
            self._average = [t.detach().clone() for t in self._moving] if self.settings.ema else []
            self._good = self._snapshot()
        self._look_before()

    def _look_before(self) -> None:
        """How good the model is before it is trained. It may be that no epoch makes it better."""
        self._before, _ = self._held_out()
        if self._before is not None and not math.isfinite(self._before):
            for inputs, _ in self.samples.held_batches():
                check_inputs(inputs)
            raise DataError("the loss on held-out samples is not finite before any training.", fix="other samples")
        if self._before is not None and self.settings.patience is not None:
            self._best = self._snapshot()

    # -- one step ------------------------------------------------------------------------------------------------------
    def _set_rate(self, done: float) -> float:
        assert self.settings.lr is not None
        rate = self.settings.lr * CURVES[self.settings.schedule](done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _gradients(self, inputs: Any, targets: Any) -> Tensor:
        """The gradients of one batch. Returns its loss, how many answers are right, and how many are known."""
        self._optimizer.zero_grad(set_to_none=True)
        net, teacher = self._pair(inputs)
        if self._unchecked:
            check_inputs(inputs)
        with self._half_precision():
            answer = None
            if teacher is not None:
                with torch.no_grad():
                    answer = logits_of(_answered(teacher, inputs))
            output = logits_of(_learnt(net, inputs))
            if answer is not None and self.settings.loss is not None and not self._taken:
                warn_of_quantities(output, targets)
            loss, right = self._objective(inputs, targets, output, answer, check=self._unchecked)
            if self._unchecked and self.settings.loss is None and output.ndim == 2 and self.samples.labels is not None:
                # All labels at once, so that the next step can be recorded.
                check_targets(self.samples.labels, output.detach()[:1].expand(len(self.samples.labels), -1))
                self._unchecked = False
            if self._blocks is not None:
                loss = loss + self.settings.blocks * self._blocks.loss()
        if not loss.requires_grad:
            what = "the loss depends on no parameter that is trained."
            raise DataError(what, fix="no detach(), item() or no_grad() between these and the loss")
        agree()  # nobody waits for the gradients of a process that has none
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return torch.cat([loss.detach().float().reshape(1), right])

    def _pair(self, inputs: Any) -> tuple[nn.Module, nn.Module | None]:
        """Student and teacher, compiled for batches of the first one's shapes. Other shapes would be compiled again."""
        if not self.settings.compile or active():
            return self._net, self.teacher
        shapes = [tensor.shape for tensor in tensors_in(inputs)]
        if self._compiled is None:
            made: list[Any] = [m and torch.compile(m, dynamic=False) for m in (self.student, self.teacher)]
            self._compiled = shapes, made[0], made[1]
        known, net, teacher = self._compiled
        return (net, teacher) if known == shapes else (self.student, self.teacher)

    def _half_precision(self) -> AbstractContextManager[object]:
        # Without autocast's cache, because a recorded step must contain its conversions.
        return torch.autocast("cuda", self._half, cache_enabled=False) if self._mixed else nullcontext()

    def _step(self) -> None:
        if self.settings.clip:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._taken += 1
        if self._average:
            decay = min(self.settings.ema, (1 + self._taken) / (10 + self._taken))
            means, values = list[Tensor](), list[Tensor]()
            for place, now in enumerate(tensor.detach() for tensor in self._moving):
                mean = self._average[place]
                if (mean.is_floating_point() or mean.is_complex()) and mean.shape == now.shape:
                    means.append(mean)
                    values.append(now)
                else:  # whole numbers, and buffers that grow
                    self._average[place] = now.clone()
            torch._foreach_lerp_(means, values, 1 - decay)

    # -- what can go wrong ---------------------------------------------------------------------------------------------
    def _check_finite(self, loss: float, number: int, steps: int) -> None:
        """Stop if the loss is NaN or infinite, with the weights of the last epoch that was complete."""
        if not agree(flag=not math.isfinite(loss)):
            return
        self._load(self._good)
        if is_pair(self.samples.data):
            check_inputs(self.samples.data[0])
        known = tensors_in(self.samples.data[1]) if is_pair(self.samples.data) else []
        odd = ", and some targets are NaN" if any(bool(tensor.isnan().any()) for tensor in known) else ""
        fix = "a smaller {lr}" if self.settings.is_limited else "a smaller {lr}, or {clip} to limit the gradient"
        self.stopped = f"the loss became {'NaN' if math.isnan(loss) else 'infinite'} in epoch {number + 1}"
        state = f"as it was after epoch {number}" if number else "as it was before training"
        raise TrainingError(
            "{stopped}, within its first {steps} steps{odd}; the model is {state}.",
            fix=f"a loss that leaves them out, or {fix}" if odd else fix, odd=odd,
            stopped=self.stopped, steps=steps, state=state, lr=Argument("lr", self.settings.lr),
            clip=Argument("clip", 1.0),
        )  # fmt: skip

    def _refuse_size(self, compute: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, data: Data) -> NoReturn:
        """Say which batch size would fit into memory. Where the user makes the batches, so says the fix."""
        whole = size = size_of(inputs)
        fits = False
        while size > 1 and not fits:
            size //= 2
            self._optimizer.zero_grad(set_to_none=True)
            if self._cuda:
                torch.cuda.empty_cache()
            try:
                compute(select_samples(inputs, slice(size)), select_samples(targets, slice(size)))
                fits = True
            except torch.OutOfMemoryError:
                continue
        self._load(self._good)
        held = data is self.samples.held
        if fits:
            own = "a DataLoader with {batch}" if isinstance(data, DataLoader) else "batches of {size} samples"
            error = TrainingError(
                "a batch of {whole} does not fit into the memory of {device}; {size} samples fit.",
                fix="{batch}" if is_pair(data) else own,
                whole=f"{whole} held-out samples" if held else whole, device=self._device, size=size,
                batch=Argument("batch_size", size * (share()[1] if is_pair(data) else 1)),
            )  # fmt: skip
            error.fits = size
            raise error
        raise TrainingError(
            "not even one {held}sample fits into the memory of {device}{gradients}.",
            fix="smaller inputs, {lora} for a language model, or a larger GPU", device=self._device,
            held="held-out " if held else "", gradients="" if held else " with its gradients", lora=Argument("lora", 8),
        )  # fmt: skip

    # -- measures and states -------------------------------------------------------------------------------------------
    def _held_out(self) -> tuple[float | None, float | None]:
        """Loss and accuracy on the samples that are held out, of the weights that would be the result."""
        if self.samples.held is None:
            return None, None
        now, sums, count = [t.detach().clone() for t in self._moving], self._sums(), 0
        self._load(self._snapshot())
        with evaluating(self.student), torch.no_grad(), self._half_precision():
            for inputs, targets in self.samples.held_batches():
                try:
                    sums += self._judged(inputs, targets)
                except torch.OutOfMemoryError:
                    self._refuse_size(self._judged, inputs, targets, self.samples.held)
                count += size_of(inputs)
        self._load(now)
        total, hits, known, seen = (sum(part) for part in zip(*gathered([*sums.tolist(), float(count)]), strict=True))
        if not seen:
            raise DataError("the held-out data are empty.")
        return total / seen, _share(hits, known)

    def _judged(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of a batch, times its size; how many answers are right, and how many are known."""
        answer = logits_of(_answered(self.teacher, inputs)) if self.teacher is not None else None
        loss, right = self._objective(inputs, targets, logits_of(_learnt(self.student, inputs)), answer)
        return torch.cat([size_of(inputs) * loss.float().reshape(1), right])

    def _sums(self) -> Tensor:
        """Of the loss, what is right, and what is known. In full precision, whatever the default is."""
        return torch.zeros(3, device=self._device, dtype=torch.float32)

    @property
    def _moving(self) -> list[Tensor]:
        """Everything that training changes."""
        return [*self._parameters, *(owner[name] for owner, name in self._buffers)]

    def _snapshot(self) -> list[Tensor]:
        """The weights that would be the result now."""
        if not self._average:
            return [t.detach().clone() for t in self._moving]
        # Infinity, as in a mask of attention, has no average: what is there now counts.
        pairs = zip(self._average, self._moving, strict=True)
        return [torch.where(mean.isfinite(), mean, now.detach()) for mean, now in pairs]

    def _load(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for number, (own, tensor) in enumerate(zip(self._moving, tensors, strict=True)):
                if own.shape == tensor.shape:
                    own.copy_(tensor)
                else:  # a buffer that grows
                    owner, name = self._buffers[number - len(self._parameters)]
                    owner[name] = tensor.to(own.device, copy=True)

    def _save(self) -> None:
        assert self._file is not None
        self._file.save(
            {
                "moving": [t.detach() for t in self._moving], "average": self._average, "best": self._best,
                "optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict(),
                "random": gathered(map_tensors(lambda t: t.cpu(), random_state(self.samples.generators, self._device))),
                "history": [asdict(row) for row in self.history], "taken": self._taken,
                "seconds": self._budget.seconds, "stopped": self.stopped, "before": self._before,
            }
        )  # fmt: skip

    def _restore(self) -> bool:
        """Whether there was a file to go on from."""
        state = self._file.restore() if self._file is not None else None
        if state is None:
            return False
        self.samples.forget()
        try:
            self._load(state["moving"])
            self._average = [t.to(own.device) for t, own in zip(state["average"], self._average, strict=True)]
            self._best = [t.to(own.device) for t, own in zip(state["best"], self._moving, strict=bool(state["best"]))]
            self._optimizer.load_state_dict(state["optimizer"])
            self._scaler.load_state_dict(state["scaler"])
            self.history = [Epoch(**row) for row in state["history"]]
            self._taken, self.stopped, self._before = int(state["taken"]), str(state["stopped"]), state["before"]
            self._budget.used = float(state["seconds"])
            set_random_state(state["random"][share()[0]], self.samples.generators, self._device)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            assert self._file is not None
            what = f"{self._file.path} is damaged: {type(error).__name__}: {error}"
            raise FileFormatError(what, where=self._file.path) from error
        self._good = self._snapshot()
        return True


def _share(right: float, known: float) -> float | None:
    """The accuracy; None if no target is known, or some are no classes."""
    return right / known if known > 0 else None


def _places(model: nn.Module) -> list[tuple[dict[str, Tensor], str]]:
    """Where the buffers of a model are, each once."""
    known, found = set[int](), list[tuple[dict[str, Tensor], str]]()
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in known:
                known.add(id(tensor))
                found.append((module._buffers, name))  # type: ignore[arg-type]
    return found


def _answered(model: nn.Module, inputs: Any) -> Any:
    """What a model makes of a copy of a batch: its forward may write to what it is given."""
    try:
        return run(model, map_tensors(torch.clone, inputs))
    except (torch.OutOfMemoryError, SecateurError):
        raise
    except Exception as error:
        if "more than 1 value per channel" in str(error):
            what = "a batch norm cannot be trained on a batch of one sample"
            raise DataError(f"{what}: {error}.", fix="drop_last=True for a DataLoader, or larger batches") from error
        order = "reshape instead of view in its forward, or channels_last=False" if "view size" in str(error) else ""
        raise refusal(unwrap(model), "a batch", inputs, error, order) from error


def _learnt(student: nn.Module, inputs: Any) -> Any:
    """What a student makes of a batch. It is trained in full precision, also if the model that was given is not."""
    return _answered(student, map_tensors(full, inputs))


def _optimizer(parameters: list[nn.Parameter], settings: Recover) -> torch.optim.Optimizer:
    lr, decay = settings.lr or 0.0, settings.weight_decay or 0.0
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay)
    return torch.optim.SGD(parameters, lr, settings.momentum, weight_decay=decay)
