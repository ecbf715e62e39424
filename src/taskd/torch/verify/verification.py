"""Every n steps the gradients of each rank are computed a second time, by another rank.

A step that is replayed gives the same bits, so two devices of the same kind must get the same
gradients for the same batch. In a step with a check, `Step.verified` keeps the inputs of its first
pass and the fingerprint of its gradients. At the gate before the update (`step_cycle.py`) each rank
sends the inputs to its checker, repeats the pass of another rank, without communication and without
a trace, and all compare. `core/worker/gradient_vote.py` says who checks whom, and who is wrong.

A check says nothing if the pass is not deterministic, if it communicates, or if it depends on
anything but its inputs, the protected state and random numbers. So each rank first repeats its own
pass, once; if any check cannot be made, the ranks say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from taskd.core.worker import gradient_vote as vote
from taskd.core.worker.gradient_vote import GradientVerdict
from taskd.model.ids import Rank
from taskd.torch import compat, random_state
from taskd.torch.context import JobContext
from taskd.torch.groups import sealed_objects
from taskd.torch.groups.all_groups import Communicates
from taskd.torch.state import fingerprints
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import is_distributed
from taskd.torch.state.undo import Undo
from taskd.torch.verify.gradient_print import GradientPrint
from taskd.torch.verify.packed_call import NotData, pack, unpack

log = logging.getLogger(__name__)
T = TypeVar("T")

NOT_CHECKED = GradientVerdict()


class Broken(Exception):
    """The groups broke during the check."""


class Verification:
    """One rank's part in the checks."""

    def __init__(self, every: int, context: JobContext, undo: Undo) -> None:
        self._every, self._context, self._undo = every, context, undo
        self._protected = context.protected
        self._kind = device_kind(context.protected)
        self._function: Callable[..., Any] | None = None
        """What the script has called in this step; None: nothing yet."""
        self._packed = b""
        self._printed = GradientPrint()
        self._is_deterministic = False
        """This rank has repeated its own pass, and got the same bits."""
        self._off = ""
        """Why this rank cannot take part in any check; empty: it can."""
        self._last_right = -1
        """The last step in which all gradients were found to be right."""
        self._has_warned = False

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def begin(self) -> None:
        """A step, or another attempt at it, begins."""
        self._function, self._packed = None, b""

    # In the step

    def run(self, step: int, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Call the function; in a step with a check, keep what a peer needs to repeat it."""
        if self._off or self._function is not None or not self.is_due(step):
            return function(*args, **kwargs)
        self._function, self._printed = function, GradientPrint()
        own = self._protected.has_own_buffers(step)
        try:
            self._packed = pack(args, kwargs, self._protected.buffers() if own else None)
        except NotData as error:
            self._off = str(error)
            return function(*args, **kwargs)
        # As the peers will have them: where a tensor lies in memory may change the last bit.
        call = unpack(self._packed)
        with self._printed.recording(self._protected.parameters):
            return function(*call.args, **call.kwargs)

    # At the gate

    def check(self, step: int) -> GradientVerdict | None:
        """The verdict of all ranks. None: the groups broke."""
        try:
            return self._check(step)
        except Broken:
            return None
        finally:
            self.begin()

    def _check(self, step: int) -> GradientVerdict:
        own = self._printed.value() if self._packed else 0
        problem = self._problem()
        rows = self._gather([len(self._packed), self._kind, own, bool(problem), self._last_right])
        if reason := problem or _common_problem(rows):
            return self._skip(step, reason)
        ranks = tuple(rows)
        self._last_right = max(row[4] for row in rows.values())
        checked_by = vote.checkers(ranks, step // self._every)
        sizes = {rank: row[0] for rank, row in rows.items()}
        second = self._second_results(checked_by, sizes, own)
        if second is None:
            return self._skip(step, self._off or "a rank could not take part; its log says why")
        results = {rank: row[2] for rank, row in rows.items()}
        disputes = vote.disputed(results, second)
        if not disputes:
            self._last_right = step
            return NOT_CHECKED
        log.warning(
            "step %d: the batches of these ranks gave two different gradients: ranks=%s",
            step,
            list(disputes),
        )
        third = self._third_results(disputes, checked_by, sizes)
        if third is None:
            return self._skip(step, self._off or "a rank could not take part; its log says why")
        verdict = vote.settle(results, second, third, checked_by)
        if verdict.doubt:
            self._off = (
                f"{verdict.doubt}. The function given to step.verified depends on more than its "
                "arguments, the model and random numbers, or is not deterministic"
            )
            return self._skip(step, self._off)
        return verdict

    @property
    def last_right(self) -> int:
        """The last step in which all gradients were right; -1: none was checked."""
        return self._last_right

    def _problem(self) -> str:
        """Why this rank cannot take part in this check."""
        agreement = self._protected.agreement
        if self._off:
            return self._off
        if agreement is None or not agreement.is_uniform:
            return "the models of the ranks are not replicas of each other"
        if not self._packed:
            return "the step has not used step.verified"
        if self._printed.is_empty:
            return "the function given to step.verified has computed no gradient of the model"
        return ""

    def _second_results(
        self, checked_by: Mapping[Rank, Rank], sizes: Mapping[Rank, int], own: int
    ) -> dict[Rank, int] | None:
        """What each checker gets for the batch of the rank that it checks."""
        me = Rank(self._context.rank)
        (checked,) = (rank for rank, by in checked_by.items() if by == me)
        (received,) = self._exchange([checked_by[me]], [(checked, sizes[checked])])
        if not self._is_deterministic and not self._off:
            again = self._repeat(self._packed)
            self._is_deterministic = again == own and not self._off
            if not self._is_deterministic:
                self._off = self._off or (
                    f"rank {me} has computed the gradients of one batch twice, and got different "
                    "bits: the function given to step.verified is not deterministic, or depends on "
                    "something that it changes"
                )
        result = 0 if self._off else self._repeat(received)
        rows = self._gather([result, bool(self._off)])
        if any(row[1] for row in rows.values()):
            return None
        return {rank: rows[by][0] for rank, by in checked_by.items()}

    def _third_results(
        self,
        disputes: Sequence[Rank],
        checked_by: Mapping[Rank, Rank],
        sizes: Mapping[Rank, int],
    ) -> dict[Rank, int] | None:
        """What a third rank gets for each disputed batch."""
        me = Rank(self._context.rank)
        referees = vote.referees(disputes, checked_by)
        mine = [rank for rank in disputes if referees[rank] == me]
        to = [referees[me]] if me in referees else []
        received = self._exchange(to, [(rank, sizes[rank]) for rank in mine])
        results = {rank: self._repeat(data) for rank, data in zip(mine, received, strict=True)}
        rows = self._gather([*(results.get(rank, 0) for rank in disputes), bool(self._off)])
        if any(row[-1] for row in rows.values()):
            return None
        return {rank: rows[referees[rank]][at] for at, rank in enumerate(disputes)}

    def _repeat(self, packed: bytes) -> int:
        """The gradients of this call, computed without the peers. Nothing changes by it."""
        assert self._function is not None
        protected, printed = self._protected, GradientPrint()
        parts = _print_parts(protected)
        try:
            call = unpack(packed)
            with ExitStack() as stack:
                stack.enter_context(self._undo.rewound())
                if call.buffers is not None:
                    compat.copy_all(protected.buffers(), call.buffers)
                stack.enter_context(self._context.groups.alone())
                for model in protected.ddp_models():
                    synced = model.require_forward_param_sync
                    stack.callback(setattr, model, "require_forward_param_sync", synced)
                    stack.enter_context(model.no_sync())
                stack.enter_context(random_state.borrowed(call.random))
                stack.enter_context(printed.recording(protected.parameters))
                stack.enter_context(torch.enable_grad())
                self._function(*call.args, **call.kwargs)
        except Communicates as error:
            self._off = (
                f"the function given to step.verified communicates ({error}): another rank cannot "
                "repeat it alone. Do that outside of it"
            )
        except Exception as error:
            log.exception("a peer's batch could not be computed again")
            self._off = f"the function failed with another rank's batch: {error}"
        if changed := [name for name, one in _print_parts(protected).items() if one != parts[name]]:
            self._off = (
                f"the function given to step.verified changes {', '.join(changed)}, which is "
                "protected: change it outside of the function"
            )
        return 0 if self._off else printed.value()

    def _skip(self, step: int, reason: str) -> GradientVerdict:
        if not self._has_warned:
            self._has_warned = True
            log.warning("step %d: gradients are not verified: %s", step, reason)
        return NOT_CHECKED

    # Communication

    def _gather(self, mine: list[int]) -> dict[Rank, list[int]]:
        groups = self._context.groups
        rows = sealed_objects.gather_numbers([int(number) for number in mine])
        groups.wait_for_devices()
        if groups.is_broken():
            raise Broken
        return {Rank(rank): row for rank, row in zip(groups.world.shape.ranks, rows, strict=True)}

    def _exchange(self, to: Sequence[Rank], sources: Sequence[tuple[Rank, int]]) -> list[bytes]:
        """Send our own inputs to these ranks, and receive theirs, of these sizes."""
        groups, device = self._context.groups, compat.device_for_objects(None)
        at = groups.world.shape.ranks.index
        mine = torch.frombuffer(bytearray(self._packed), dtype=torch.uint8).to(device)
        received = [torch.zeros(size, dtype=torch.uint8, device=device) for _, size in sources]
        operations = [dist.P2POp(dist.isend, mine, at(rank)) for rank in to]
        operations += [
            dist.P2POp(dist.irecv, target, at(rank))
            for (rank, _), target in zip(sources, received, strict=True)
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        groups.wait_for_devices()
        if groups.is_broken():
            raise Broken
        return [target.cpu().numpy().tobytes() for target in received]


def problems(protected: Protected) -> list[str]:
    """Why the gradients of this model cannot be verified."""
    found = []
    if any(map(is_distributed, protected.parameters)):
        found.append(
            "verify_every needs replicas (DDP, or plain modules): the model is sharded, and no "
            "other rank can compute this rank's part alone"
        )
    if not torch.are_deterministic_algorithms_enabled():
        found.append(
            "verify_every needs deterministic algorithms: call "
            "torch.use_deterministic_algorithms(True) before protect()"
        )
    on_gpu = any(parameter.is_cuda for parameter in protected.parameters)
    if on_gpu and torch.backends.cudnn.benchmark:
        found.append(
            "verify_every needs torch.backends.cudnn.benchmark = False: each device would choose "
            "its own algorithms, and round differently"
        )
    return found


def device_kind(protected: Protected) -> int:
    """Ranks with the same number get the same bits from the same inputs."""
    devices = {parameter.device for parameter in protected.parameters}
    names = sorted(
        torch.cuda.get_device_name(one) if one.type == "cuda" else _processor() for one in devices
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return fingerprints.of_value([torch.__version__, names, capability, torch.get_num_threads()])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("model name", "CPU part"))), "")


def _common_problem(rows: Mapping[Rank, list[int]]) -> str:
    """Why no rank is checked. The same on all of them."""
    if len(rows) < vote.FEWEST:
        return f"{len(rows)} ranks are left, and {vote.FEWEST} are needed to say which one is wrong"
    if unable := [rank for rank, row in rows.items() if row[3]]:
        return f"rank {unable[0]} cannot take part; its log says why"
    if len({row[1] for row in rows.values()}) > 1:
        return "the ranks have different kinds of devices, or numbers of threads"
    return ""


def _print_parts(protected: Protected) -> dict[str, int]:
    return {
        name: fingerprints.of_value(part.state_dict()) for name, part in protected.parts.items()
    }
