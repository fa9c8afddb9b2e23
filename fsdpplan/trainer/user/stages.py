"""A user's model cut into pipeline stages: each runs the model's own forward between its ends.

A stage is the model's tree of modules with other things in the place of what other stages have. A
block before its own gives what it is given, the first of them what the stage received; at the first
block behind its own the forward ends, by an exception that the stage catches. So masks, positions
and rotary tables are made on each stage by the model's own code, of the tokens that each stage is
given. Parameters before the blocks are zeros that take no memory, but on the first stage: what is
computed with them is what the received hidden states take the place of.

Modules that hold nothing foreign are the model's own; the others are copied, and share their
buffers. Names of parameters stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PlanConfig
from ..errors import TrainerError
from ..parallel.pipeline_stages import StageShare, rank_shares
from ..precision import compute_dtype
from .trace import Trace, with_hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where each parameter outside of the blocks belongs."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    first: frozenset[str]
    """Names of the first stage's."""
    last: frozenset[str]
    """Names of the last stage's."""
    copies: Mapping[str, str]
    """Of those, names that are the first stage's parameter, too -> its name there."""


def cut_model(model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, plan: PlanConfig) -> Cut:
    """Assign the parameters of `model` to stages; raises where they cannot be."""
    _require_cuttable(model, blocks, plan)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    inside = _names_inside(model, blocks)
    first = {name for name in trace.before if name not in inside}
    last = {name for name in trace.behind if name not in inside}
    unused = {name for name in names if name not in inside | first | last}
    # of a tied parameter one name may be used, and a parameter of no use is trained nowhere
    first |= {name for name in unused if not _is_another(model, name, first | last)}
    owner_of = {id(model.get_parameter(name)): name for name in sorted(first, key=names.index)}
    copies = {
        name: owner_of[id(model.get_parameter(name))]
        for name in last
        if id(model.get_parameter(name)) in owner_of
    }
    return Cut(
        model=model,
        blocks=blocks,
        first=frozenset(first),
        last=frozenset(last),
        copies=copies,
    )


def _is_another(model: nn.Module, name: str, known: Collection[str]) -> bool:
    parameter = model.get_parameter(name)
    return any(model.get_parameter(each) is parameter for each in known)


def _names_inside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    return {
        name
        for block in blocks
        for name, _ in block.named_parameters(prefix=paths[id(block)], remove_duplicate=False)
    }


def _require_cuttable(model: nn.Module, blocks: Sequence[nn.Module], plan: PlanConfig) -> None:
    kind, numbers = type(model).__name__, plan.layout.stage_blocks
    if sum(numbers) != len(blocks):
        raise TrainerError(
            f"the plan cuts {sum(numbers)} blocks into stages, and {len(blocks)} were found in "
            f"{kind}: plan again for its shape, or name them by parallelize(..., blocks=[...])"
        )
    owners: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise TrainerError(
                    f"blocks {owners[id(parameter)]} and {number} of {kind} share a parameter, and "
                    "stages hold their own: plan again with --pp 1"
                )
    shared = next((n for n, p in _outside(model, blocks) if id(p) in owners), None)
    if shared is not None:
        raise TrainerError(
            f"{shared} of {kind} is a block's parameter, too, and stages hold their own: plan "
            "again with --pp 1"
        )
    wrapped = next(
        (path for path, module in model.named_modules() if "forward" in vars(module)), None
    )
    if wrapped is not None or model._forward_hooks:
        raise TrainerError(
            f"the forward of {wrapped or kind} was wrapped or has hooks, which a stage would not "
            "run: do that to the blocks, or plan again with --pp 1"
        )


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    inside = _names_inside(model, blocks)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in inside:
            yield name, parameter


class Stage:
    """One stage: the module that runs it, and its own blocks."""

    def __init__(self, cut: Cut, share: StageShare, plan: PlanConfig, device: torch.device) -> None:
        self.share = share
        self.blocks = [cut.blocks[number] for number in share.blocks]
        self._received: list[Tensor] = []
        self.hands_on: Tensor | None = None
        """What the next stage is sent, once that is stated: its shape and dtype."""
        self.loss_of: Callable[[Any, Mapping[str, Any]], Tensor] | None = None
        self.beside: dict[str, Any] = {}
        """What the model is given by name in every micro-batch of a step."""
        paths = {id(module): path for path, module in cut.model.named_modules()}
        replaced = {
            paths[id(block)]: self._stand_in(number, block)
            for number, block in enumerate(cut.blocks)
            if number not in share.blocks
        }
        self.last_block: nn.Module = replaced.get(paths[id(cut.blocks[-1])], cut.blocks[-1])
        """What stands in the place of the model's last block."""
        self.first_block: nn.Module = replaced.get(paths[id(cut.blocks[0])], cut.blocks[0])
        """The same of its first one."""
        own = (cut.first if share.is_first else frozenset()) | (
            cut.last if share.is_last else frozenset()
        )
        foreign = {name for name, _ in _outside(cut.model, cut.blocks) if name not in own}
        values = {
            name: _zeros(cut.model.get_parameter(name), plan, device) for name in sorted(foreign)
        }
        made: dict[int, nn.Parameter] = {}
        for name in sorted(cut.copies) if share.is_last and not share.is_first else ():
            tied = cut.model.get_parameter(name)
            made.setdefault(id(tied), nn.Parameter(tied.detach().clone(), tied.requires_grad))
        copies = {name: made[id(cut.model.get_parameter(name))] for name in cut.copies if made}
        self.module = _copied(cut.model, "", replaced, values, copies)
        self._path_of = paths
        self._before = list(self.module._forward_pre_hooks.items())
        self.module._forward_pre_hooks.clear()
        self._with_names = dict(cut.model._forward_pre_hooks_with_kwargs)
        self.module._forward_pre_hooks_with_kwargs.clear()
        self._forward: Callable[..., Any] = self.module.forward
        self.module.forward = self._run

    def _sent(self, hidden: Tensor) -> Tensor:
        stated = self.hands_on
        if stated is None:
            return hidden
        if hidden.shape != stated.shape:
            raise TrainerError(
                f"hidden states of shape {list(hidden.shape)} came out of stage "
                f"{self.share.index}, and the stages of this pipeline were made for "
                f"{list(stated.shape)}: give sequences of the plan's length, or "
                "parallelize(..., example=...) of the length that you train"
            )
        return hidden.to(stated.dtype)

    def head(self, whole: nn.Linear | None) -> nn.Linear | None:
        """What this stage has of a module of the whole model; None on all but the last stage."""
        if whole is None or not self.share.is_last:
            return None
        found = self.module.get_submodule(self._path_of[id(whole)])
        assert isinstance(found, nn.Linear)
        return found

    def end(self) -> None:
        """Let the forward end behind the model's last block, where the next stage has none, and
        begin before its first one, where the stage before has none. To be called when FSDP has put
        its hooks on the blocks."""
        if not self.share.is_first and not isinstance(self.first_block, _Foreign):
            # before FSDP's, which must see what the block is really given
            self.first_block.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if not self.share.is_last and not isinstance(self.last_block, _Behind):
            self.last_block.register_forward_hook(_end)

    def _enter(self, _: nn.Module, args: Any, named: Any) -> Any:
        return with_hidden(self._received[0], args, named)

    def _stand_in(self, number: int, block: nn.Module) -> nn.Module:
        if number >= self.share.blocks.stop:
            return _Behind(block)
        return _Before(block, self._received if number == 0 else None)

    def _run(self, x: Tensor, **given: Any) -> Any:
        """What the next stage is sent; on the last one the loss."""
        args, named = from_names(given)
        named |= self.beside
        for key, hook in self._before:
            if key in self._with_names:
                changed = hook(self.module, args, named)
                args, named = (args, named) if changed is None else changed
            else:
                changed = hook(self.module, args)
                args = args if changed is None else changed
        if not self.share.is_first:
            self._received[:] = [x]
        try:
            output = self._forward(*args, **named)
        except _Reached as reached:
            return self._sent(reached.hidden)
        finally:
            self._received.clear()
        if self.loss_of is None:
            return output
        return self.loss_of(output, given)


POSITION = "position_"
"""Before the number of an argument that is given by its position."""


def from_names(given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name, from what a stage is given, which is all by name."""
    places = sorted(
        (int(name.removeprefix(POSITION)), value)
        for name, value in given.items()
        if _is_place(name)
    )
    named = {
        name: value for name, value in given.items() if not _is_place(name) and name != TARGETS
    }
    return tuple(value for _, value in places), named


TARGETS = "targets of the loss"
"""Name under which a stage is given what the loss is computed with."""


def _is_place(name: str) -> bool:
    return name.startswith(POSITION) and name.removeprefix(POSITION).isdigit()


class _Reached(Exception):
    """The forward has come to the first block that another stage has."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _end(_: nn.Module, __: Any, output: Any) -> None:
    raise _Reached(output[0] if isinstance(output, tuple) else output)


class _Foreign(nn.Module):
    """In the place of a block that another stage has; it knows what a model may ask of one."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, str | int | float | None) and name not in vars(self):
                setattr(self, name, value)

    def given(self, args: Any, named: Any) -> Tensor:
        hidden: Tensor = args[0] if args else named["hidden_states"]
        return hidden


class _Before(_Foreign):
    """Gives what it is given, or what the stage received."""

    def __init__(self, block: nn.Module, received: list[Tensor] | None) -> None:
        super().__init__(block)
        self.received = received

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.given(args, named) if self.received is None else self.received[0]


class _Behind(_Foreign):
    """Ends the stage."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        raise _Reached(self.given(args, named))


def _zeros(like: Tensor, plan: PlanConfig, device: torch.device) -> Tensor:
    """As large as a parameter, in one element of memory; of the dtype in which it is gathered."""
    gathered = plan.layout.sharding == "fsdp" and like.is_floating_point()
    dtype = compute_dtype(plan.training) if gathered else like.dtype
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


def _copied(
    module: nn.Module,
    path: str,
    replaced: Mapping[str, nn.Module],
    values: Mapping[str, Tensor],
    copies: Mapping[str, nn.Parameter],
) -> nn.Module:
    """`module`, or a copy of it where something of it is another's."""
    inside = f"{path}." if path else ""
    children = {
        name: None
        if child is None
        else replaced[inside + name]
        if inside + name in replaced
        else _copied(child, inside + name, replaced, values, copies)
        for name, child in module._modules.items()
    }
    own = {name: inside + name for name in module._parameters}
    is_same = all(child is module._modules[name] for name, child in children.items())
    if is_same and path and not any(each in values or each in copies for each in own.values()):
        return module
    made = shallow_copy(module)
    made._modules = children
    for name, whole in own.items():
        if whole in values:
            del made._parameters[name]
            made.__dict__[name] = values[whole]
        elif whole in copies:
            made._parameters[name] = copies[whole]
    return made


_OWN_DICTS = (
    "_modules",
    "_parameters",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class with the same contents, but for dicts of its own; its buffers are
    in the same dict, so that both see values that are put there."""
    made: nn.Module = module.__new__(type(module))
    made.__dict__.update(vars(module))
    for name in _OWN_DICTS:
        made.__dict__[name] = type(vars(module)[name])(vars(module)[name])
    return made


def merged(cut: Cut, stages: Sequence[Stage]) -> nn.Module:
    """The whole model with what this rank's stages have of it; not to be called."""
    root = _merge(cut.model, "", cut, [stage.module for stage in stages])
    return nn.Module() if root is None else root


def _merge(module: nn.Module, path: str, cut: Cut, parts: Sequence[nn.Module]) -> nn.Module | None:
    if any(module is block for block in cut.blocks):
        return next((part for part in parts if not isinstance(part, _Foreign)), None)
    if all(part is module for part in parts):
        return module
    own = parameters_of(path, parts)
    holding = [part for part in parts if part._parameters is own]
    if holding and not module._modules:
        return holding[0]
    # of a list a stage has some numbers only
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    holder = nn.Module() if is_list else shallow_copy(module)
    holder._parameters = own
    holder._modules = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        inside = f"{path}.{name}" if path else name
        found = [each for part in parts if (each := part._modules[name]) is not None]
        made = _merge(child, inside, cut, found)
        if made is not None:
            holder._modules[name] = made
    has_any = holder._parameters or holder._buffers or holder._modules
    return holder if has_any or not list(module.parameters()) else None


def parameters_of(path: str, parts: Sequence[nn.Module]) -> Any:
    """The dict of a module's own parameters, that of the stage which has them."""
    holding = [
        part._parameters
        for part in parts
        if any(each is not None for each in part._parameters.values())
    ]
    different = [each for each in holding if each is not holding[0]]
    if different:
        raise TrainerError(
            f"{path or 'the model'} holds parameters of the first and of the last stage, which "
            "are one rank's under this schedule: plan again with --schedule 1f1b"
        )
    return holding[0] if holding else {}


def stages_of(cut: Cut, plan: PlanConfig, *, pp_rank: int, device: torch.device) -> list[Stage]:
    """The stages of a pipeline rank."""
    return [Stage(cut, share, plan, device) for share in rank_shares(plan, pp_rank=pp_rank)]
