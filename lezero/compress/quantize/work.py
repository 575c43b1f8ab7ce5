"""One quantization from beginning to end: block by block, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.batch_norm import fold_batch_norms_
from lezero.compress.quantize.batches import Batch, comparable, first_call
from lezero.compress.quantize.capture import Capture, Layers, record_for
from lezero.compress.quantize.conv_outputs import ConvOutputs
from lezero.compress.quantize.evidence import Evidence, noting
from lezero.compress.quantize.folds import (
    Fold,
    copied,
    find_folds,
    in_one_place,
    still_holding,
)
from lezero.compress.quantize.hessians import (
    Room,
    Sites,
    as_they_come,
    hessian_bytes,
    outside_of_blocks,
    room_of_block,
)
from lezero.compress.quantize.input_rounding import InputRounding
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.layer import (
    adopt,
    build,
    linear_user,
    output_error,
    quantized_bytes,
    weight_error,
)
from lezero.compress.quantize.methods import methods
from lezero.compress.quantize.modules import QuantizedLayer
from lezero.compress.quantize.outliers import Outliers
from lezero.compress.quantize.replay import OneBlock, Replay
from lezero.compress.quantize.report import LayerReport, named
from lezero.compress.quantize.request import Request
from lezero.compress.quantize.scaling import Scaling
from lezero.compress.quantize.scheme import Target
from lezero.compress.quantize.sites import Site, User
from lezero.compress.quantize.speed import AS_IT_WAS, LayerSpeed
from lezero.compress.quantize.spill import Spill
from lezero.core.errors import NumericsError
from lezero.core.interrupts import let_in
from lezero.memory.pool import give_back_free_blocks
from lezero.nn.blocks import blocks

# Bytes from which the heap is worth trimming: what is freed there otherwise stays resident.
_LARGE = 1 << 20


class Work:
    """Quantizes the weights that a request names, and fills its report.

    Changes go through `journal`, so that the caller can undo them. The model is in eval mode and
    computes no gradients.
    """

    def __init__(self, request: Request, journal: Journal, spill: Spill) -> None:
        self.model, self.batches = request.model, request.batches
        self.objective, self.report = request.objective, request.report
        self.targets, self.journal, self.spill = request.targets, journal, spill
        self.recipe = request.scheme.recipe()
        self.method = methods.get(self.recipe.method)()
        self.sites = list({id(site): (site, to) for site, to in self.targets.values()}.values())
        self.speed = LayerSpeed(self.report.decisions)
        self.rounding = InputRounding(self.recipe.exact_above or math.inf, self.speed)
        self.outliers = Outliers()
        self.conv_outputs = ConvOutputs(request.model, self.report)
        self.private = in_one_place(request.model)
        self.chosen = {id(user.module) for site, _ in self.sites for user in site.users}
        self.folded: dict[int, nn.Module] = {}
        """Batch norms, by the ids of the convolutions that they are part of now."""
        self.scaling = Scaling(self.recipe, self.method, self.sites, self.journal)
        self._elsewhere: set[int] = set()
        """Ids of parameters that are read outside of their block, by another that shares them."""
        self._unreached: list[str] = []
        self._taken: list[tuple[Site, list[QuantizedLayer]]] = []

    def run(self) -> None:
        if self.batches is None:
            for site, target in self.sites:
                self._finish(site, target, {})
                self._adopt()
            return
        if self.recipe.fold_batch_norm:
            folded = fold_batch_norms_(
                self.model, self.batches, self.chosen, self.private, self.journal, self.spill
            )
            self.folded = {id(conv): norm for conv, norm in folded}
            if folded:
                self.report.notes.append(
                    f"{len(folded)} batch norms are part of the convolutions before them now"
                )
        if self.objective == "speed":
            self.conv_outputs.ask(self.batches, self.sites)
        self._in_blocks(self.batches)
        self._in_the_rest(self.batches)
        self.report.notes += self.scaling.why_nothing()
        if self._unreached:
            self.report.notes.append(
                f"no data was seen to come through {named(self._unreached)}: quantized without "
                "it, and the error is that of the weight; what reads a weight by itself, past its "
                "layer, rounds no activations"
            )
        if self.scaling.kept:
            self.report.notes.append(
                "their channels are scaled all the same, as layers beside them are quantized: "
                + named(self.scaling.kept)
            )
        self.report.notes += self.outliers.notes()
        self.rounding.decide(self.report, speed=self.objective == "speed")

    def _in_blocks(self, batches: list[Batch]) -> None:
        found = blocks(self.model)
        if not any(self._sites_in(name) for name, _ in found):
            return
        replay = Replay(self.model, batches, found, self.spill)
        if replay.blocks and not replay.is_chain:
            self.report.notes.append(
                f"{replay.why_no_chain}: each was calibrated by running all blocks before it"
            )
        self.scaling.state = replay.state if replay.blocks else ""
        self._elsewhere = replay.read_elsewhere
        self.private -= self._elsewhere
        last = max((k for k, (n, _) in enumerate(replay.blocks) if self._sites_in(n)), default=-1)
        for index, (name, _) in enumerate(replay.blocks[: last + 1]):
            self._block(OneBlock(replay, index), self._sites_in(name), index < last)

    def _block(self, block: OneBlock, sites: Sites, hand_on: bool) -> None:
        """Looks at what a block is given, quantizes it, and runs it for the next one."""
        if sites:
            capture, folds = self._looked(block, sites)
            while capture.parted:
                apart = capture.parted | capture.apart
                del capture, folds  # their memory first
                capture, folds = self._looked(block, sites, apart)
            scaled = self.scaling.scale(folds)
            self._observe_again(scaled, block, capture.apart)
            self._finish_block(block, sites, capture)
            self.scaling.take_back(scaled)
            del capture
        if hand_on and block.replay.is_chain:
            block.run(block.module.forward, store=True)

    def _finish_block(self, block: OneBlock, sites: Sites, capture: Capture) -> None:
        """Quantizes the layers of a block, see [Note: Hessians of a block]."""

        def again(left: Sites) -> Capture:
            make = self._record(room_of_block(block.module, left))
            users = [linear_user(site, capture.inputs) for site, _ in left]
            return block.watch(Capture(users, make, capture.apart))

        needed = self.method.needs_hessian
        for some, last in as_they_come(sites, capture.inputs, needed, again):
            for site, target in some:
                self._finish(site, target, capture.inputs)
                if last:
                    self._adopt()
        self._adopt()

    def _looked(
        self, block: OneBlock, sites: Sites, apart: Iterable[Layers] = ()
    ) -> tuple[Capture, list[Fold]]:
        """What the layers of a block are given, and what can be scaled in front of them."""
        forward, replay = block.module.forward, block.replay
        capture = self._capture(sites, apart, room_of_block(block.module, sites))
        folds: list[Fold] = []

        def look(*args: Any, **kwargs: Any) -> Any:
            nonlocal folds
            first = not capture.calls
            with capture.watching(block.module), noting(capture.calls if folds else ()) as given:
                output = forward(*args, **kwargs)

            def again() -> list[Tensor]:
                return comparable(forward(*args, **kwargs))

            if first and not replay.state and block.module not in replay.open:
                groups = self.scaling.groups(capture.inputs, sites)
                folds = find_folds(groups, capture.calls, self.private, self.chosen, again)
            elif folds:
                seen = Evidence(copied(comparable(output)), given)
                folds = still_holding(folds, seen, again)
            return output

        block.run(look)
        return capture, folds

    def _in_the_rest(self, batches: list[Batch]) -> None:
        """What lies outside of the blocks or is read there, or in blocks that were not reached."""
        done = {layer.name for layer in self.report.layers}
        left = [(site, target) for site, target in self.sites if site.name not in done]
        parts = outside_of_blocks(left, self.method.needs_hessian)
        ran = max((self._finish_some(batches, sites) for sites in parts), default=0)
        if 0 < ran < len(batches) and not done:
            self.report.notes.append(
                f"only {ran} of {len(batches)} batches ran: nothing asked for needs more"
            )

    def _finish_some(self, batches: list[Batch], sites: Sites) -> int:
        """Quantizes these; how many batches ran for it."""
        capture, ran = self._looked_at_all(batches, sites)
        while capture.parted:
            apart = capture.parted | capture.apart
            del capture
            capture, ran = self._looked_at_all(batches, sites, apart)
        for site, target in sites:
            self._finish(site, target, capture.inputs)
            self._adopt()
        return ran

    def _looked_at_all(
        self, batches: list[Batch], sites: Sites, apart: Iterable[Layers] = ()
    ) -> tuple[Capture, int]:
        """What layers are given by the whole model, and how many batches it took to see it."""
        capture = self._capture(sites, apart, Room(math.inf))
        counted = any(self._needs_statistics(site, target) for site, target in sites)
        for index, batch in enumerate(batches):
            if index and not counted and self._have_inputs(sites, capture):
                return capture, index
            with capture.watching(self.model):
                first_call(self.model, batch, index)
        return capture, len(batches)

    def _have_inputs(self, sites: Sites, capture: Capture) -> bool:
        seen = (capture.inputs.get(user.name) for site, _ in sites for user in site.users)
        return all(one is not None and one.first is not None for one in seen)

    def _needs_statistics(self, site: Site, target: Target) -> bool:
        """Whether more than the first batch counts for this weight: else that is enough to measure
        its error and its speed on."""
        recipe = self.recipe
        by_error = recipe.scales == "mse" or recipe.bias_correction
        return site.kind != "embedding" and (
            target.activations != "float" or self.method.needs_data or by_error
        )

    def _capture(self, sites: Sites, apart: Iterable[Layers], room: Room) -> Capture:
        users = [user for site, _ in sites for user in site.users]
        return Capture(users, self._record(room), apart)

    def _record(self, room: Room) -> Callable[[User], Inputs]:
        def hessian(site: Site) -> bool:
            return self.method.needs_hessian and room.take(hessian_bytes(site))

        return record_for(self.targets, self.recipe, hessian)

    def _sites_in(self, block: str) -> Sites:
        """What a block alone reads: its inputs are all that these are given."""
        inside = f"{block}."
        return [
            (site, target)
            for site, target in self.sites
            if id(site.parameter) not in self._elsewhere
            and all(user.name.startswith(inside) for user in site.users)
        ]

    def _observe_again(self, scaled: list[Fold], block: OneBlock, apart: Iterable[Layers]) -> None:
        """Static activations have the ranges of the inputs as they are once they were scaled."""
        static = [f for f in scaled if self.targets[f.sites[0].name][1].activations == "tensor"]
        if not static:
            return
        users = [user for fold in static for site in fold.sites for user in site.users]
        make = record_for(self.targets, self.recipe, lambda _: False)
        capture = block.watch(Capture(users, make, apart))
        for fold in static:
            fold.inputs.observer = capture.inputs[fold.sites[0].name].observer

    @torch.no_grad()
    def _finish(self, site: Site, target: Target, inputs: dict[str, Inputs]) -> None:
        """Quantizes one weight, unless it is better left as it was, and reports."""
        let_in()
        if any("forward" in user.module.__dict__ for user in site.users):
            self._leave(site, "its forward was replaced on the object, and would not be called")
            return
        users = [user for user in site.users if user.kind != "embedding"]
        if target.activations == "tensor" and any(user.name not in inputs for user in users):
            self._leave(site, "its inputs' scale needs calibration data, and none came through it")
            return
        if target.activations == "tensor" and any(not inputs[x.name].absmax.any() for x in users):
            self._leave(site, "the calibration data gave it nothing but zeros, which have no scale")
            return
        with Autocast.off(site.parameter.device).again():
            layers = build(site, target, self.recipe, self.method, inputs)
        known = inputs.get(linear_user(site, inputs).name)
        with nullcontext() if known is None else known.as_called():
            self._judge(site, target, layers, inputs)

    def _judge(
        self, site: Site, target: Target, layers: list[QuantizedLayer], inputs: dict[str, Inputs]
    ) -> None:
        """Takes the quantized layers of a weight, or leaves it, by what they cost and gain."""
        size = quantized_bytes(layers, site.users)
        measured = self._measure(site, target, layers, inputs)
        seen = [
            (user, layer, first)
            for user, layer in zip(site.users, layers, strict=True)
            if user.name in inputs and (first := inputs[user.name].first) is not None
        ]
        errors = [
            output_error(site, layer, user.module.forward(x), layer.forward(x))
            for user, layer, x in seen
        ]
        error = max(errors) if errors else weight_error(site, layers)
        if not math.isfinite(error):
            raise NumericsError(
                f"lz.quantize_: the quantized '{site.name}' gives NaN or infinite values on the "
                "calibration data; leave it out with filter="
            )
        figures: dict[str, Any] = {"error": error}
        if measured is not None:
            figures.update(seconds_before=measured[0], seconds_after=measured[1])
        useless = "its outputs would be no nearer than zeros" if error >= 1 else ""
        reason = useless or self._reason_to_leave(site, target, size, measured)
        if reason:
            self._leave(site, reason, **figures)
            return
        if self.recipe.exact_above is not None:
            self.rounding.look(site, target, seen, inputs)
        for user, layer, x in seen:
            self.outliers.look(user.name, layer, x)
        self._taken.append((site, layers))
        if self.batches is not None and not seen:
            self._unreached.append(site.name)
        self._add(site, target.label, size, **figures)

    def _adopt(self) -> None:
        """Puts the quantized layers that were taken in the place of the float ones."""
        while self._taken:
            site, layers = self._taken.pop(0)
            adopt(site, layers, self.journal)
            if site.nbytes > _LARGE:
                give_back_free_blocks()

    def _measure(
        self, site: Site, target: Target, layers: list[QuantizedLayer], inputs: dict[str, Inputs]
    ) -> tuple[float, float] | None:
        """Seconds of the site's layers, float and quantized; None without inputs for them."""
        timed = []
        for user, layer in zip(site.users, layers, strict=True):
            x = self._example(user, site, inputs)
            if x is not None:
                timed.append((user.module, layer, x))
        if not timed:
            return None
        before, after, xs = zip(*timed, strict=True)
        given = self.conv_outputs.inputs(after, xs)
        return self.speed.measure(target.label, before, after, xs, given)

    def _reason_to_leave(
        self, site: Site, target: Target, size: int, measured: tuple[float, float] | None
    ) -> str:
        if self.objective == "size":
            smaller = size < site.nbytes
            return "" if smaller else "it would not become smaller"
        if measured is None:
            return "there is no calibration data to measure its speed on"
        return "" if self.speed.keeps(site.name, target.label, measured) else "not faster"

    def _example(self, user: User, site: Site, inputs: dict[str, Inputs]) -> Tensor | None:
        """What a layer is timed on: the first batch's input; without data one token."""
        if user.name in inputs:
            return inputs[user.name].first
        place = site.parameter.device
        if user.kind == "conv" or self.batches is not None:
            return None
        if user.kind == "embedding":
            return torch.zeros(1, dtype=torch.int64, device=place)
        return torch.ones(1, site.weight().shape[1], dtype=site.parameter.dtype, device=place)

    def _leave(self, site: Site, reason: str, **figures: Any) -> None:
        if f"quantize {site.name}" not in self.report.decisions.records:
            self.report.decisions.record(f"quantize {site.name}", AS_IT_WAS, reason=reason)
        self._add(site, AS_IT_WAS, site.nbytes, reason=reason, **figures)

    def _add(self, site: Site, form: str, size: int, **more: Any) -> None:
        self.report.layers.append(
            LayerReport(
                name=site.name,
                form=form,
                weights=site.numel,
                bits=8 * size / site.numel,
                shared_with=tuple(user.name for user in site.users[1:]),
                **more,
            )
        )
