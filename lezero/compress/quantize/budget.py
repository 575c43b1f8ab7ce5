"""A budget of quality: met, or an error that names the layers to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.layer import relative_error
from lezero.compress.quantize.report import LayerReport, QuantizationReport
from lezero.compress.quantize.request import Request
from lezero.core.errors import ConfigError, NumericsError
from lezero.report.units import number, percent

_TRIED = 8


def output_difference(wanted: list[Tensor], found: list[Tensor]) -> float | None:
    """The largest relative error of the output tensors; None where these are others, or of other
    shapes: some depend on values (boxes that pass a threshold)."""
    if [x.shape for x in wanted] != [x.shape for x in found]:
        return None
    pairs = zip(wanted, found, strict=True)
    return max((relative_error(one, two) for one, two in pairs), default=0.0)


def need_finite(wanted: list[Tensor], found: list[Tensor], report: QuantizationReport) -> None:
    """Raises `NumericsError` for outputs that are not finite any more: NaN, and infinities where a
    tensor had none (in a mask they depend on the data)."""
    if [x.shape for x in wanted] != [x.shape for x in found]:
        return
    lost = 0
    for one, two in zip(wanted, found, strict=True):
        one, two = (x if x.itemsize > 1 else x.float() for x in (one, two))  # not for 8 bits
        bad = two.isnan() if one.isinf().any() else ~two.isfinite()
        lost += int((bad & one.isfinite()).sum())
    if lost:
        raise NumericsError(
            f"lz.quantize_: {lost:,} of {sum(x.numel() for x in wanted):,} values of the model's "
            "outputs on the first batch are not finite once it is quantized, which they were. The "
            f"largest errors are those of {_blamed(report.worst())}: leave layers out with "
            "filter=, or use more bits (float16 may overflow where bfloat16 does not), or judge by "
            "metric=. The model is as it was"
        )


def _blamed(layers: Sequence[LayerReport]) -> str:
    return ", ".join(f"'{layer.name}' (error {percent(layer.error)})" for layer in layers)


def check_budget(
    request: Request,
    measure: Callable[[], float | None],
    journal: Journal,
    *,
    rescaled: bool,
    folded: Mapping[int, nn.Module],
) -> None:
    """Raises `NumericsError` when the quality is worse than the budget, if there is one, allows.

    To say which layers are to blame, those with the largest errors become what they were, one after
    the other, until the budget is met: the caller undoes the rest. rescaled: whether weights were
    changed before they were quantized; then none is tried. folded: batch norms by the ids of the
    convolutions that took them in, with which they come back.
    """
    report, budget = request.report, request.budget
    if budget is None:
        return
    before, after = report.quality_before or 0.0, report.quality_after
    if after is None:
        raise ConfigError(
            "budget: the shapes of the model's outputs depend on values, and are others once it is "
            "quantized, so they cannot be compared; give metric="
        )
    limit = before + budget * abs(before) if request.metric is not None else budget
    if after <= limit:
        return
    worst = report.worst(_TRIED)
    remedy = "use more bits, another method, or leave layers out with filter="
    # A layer whose channels were scaled beforehand cannot come back without the layer before it.
    for count, layer in enumerate([] if rescaled else worst, 1):
        for user in request.targets[layer.name][0].users:
            journal.restore(user.module)
            if id(user.module) in folded:
                journal.restore(folded[id(user.module)])
        try:
            quality = measure()
            met = quality is not None and quality <= limit
        except NumericsError:  # this much of it quantized gives NaN
            met = False
        if met:
            kept = ", ".join(f"'{x.name}'" for x in worst[:count])
            remedy = f"leaving out {kept} would meet it (filter=)"
            break
    why = ""
    if math.isinf(after):
        why = ", since values are not finite, or not zero, that were"
    raise NumericsError(
        f"lz.quantize_: {report.metric_name} is {number(after)}{why} (before: {number(before)}), "
        f"and budget={budget:g} allows {number(limit)}. Most of the error comes from "
        f"{_blamed(worst[:5])}; {remedy}. The model is as it was"
    )
