"""Channel scales that make layers easier to quantize: SmoothQuant's and AWQ's.

For each fold (`folds.py`) some scales s are tried: the layers' outputs with weights and activations
rounded are compared with the unrounded ones on a sample of the inputs, and the best are multiplied
into the model. Not scaling at all is one of the candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.folds import Fold, producer_parameters, scale_channels
from lezero.compress.quantize.inputs import Inputs, as_known
from lezero.compress.quantize.journal import Journal
from lezero.compress.quantize.methods import Method
from lezero.compress.quantize.observers.scales import some_rows, weight_scale
from lezero.compress.quantize.scheme import Recipe, Target
from lezero.compress.quantize.sites import Site
from lezero.ops.quantize import Grid, nearest_points, quantize_tokens

_SAMPLE = 256
_AT_ONCE = 1 << 20  # weights that are multiplied together, 4 MiB in fp32
SMOOTH_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
AWQ_ALPHAS = tuple(step / 20 for step in range(1, 21))


class Scaling:
    """Does it for the layers of a request, before codes are found."""

    def __init__(
        self, recipe: Recipe, method: Method, sites: list[tuple[Site, Target]], journal: Journal
    ) -> None:
        self.recipe, self.method, self.journal = recipe, method, journal
        self.targets = {site.name: target for site, target in sites}
        self._names = {id(site.parameter): site.name for site, _ in sites}
        self.tried = self.done = False
        """Whether there was a fold to scale; whether weights of layers were changed."""
        self.kept: list[str] = []
        """Layers that stayed as they were, but for their channels."""
        self.state = ""
        """The class of an object that blocks may write to, with which nothing is tried."""
        wanted = [site for site, target in sites if self._wanted(site, target)]
        self._scalable = [not site.transposed for site in wanted if len(site.users) == 1]

    def why_nothing(self) -> list[str]:
        """A note where there were layers to scale, but none could be."""
        if self.tried or not self._scalable:
            return []
        awq = self.method.scales_channels
        why = "it needs a repeated block in which a layer before another can take the division"
        if self.state:
            why = f"blocks share an object that they may write to ({self.state})"
        if not any(self._scalable):
            why = "Conv1D layers are not scaled"
        return [
            f"'{self.recipe.method if awq else 'smooth'}' scaled no channels: {why}, so "
            + ("all was rounded to nearest" if awq else "activations were rounded as they are")
        ]

    def groups(
        self, inputs: dict[str, Inputs], sites: list[tuple[Site, Target]]
    ) -> list[tuple[Inputs, tuple[Site, ...]]]:
        """The layers whose input channels are to be scaled, by the inputs they share."""
        shared: dict[int, list[Site]] = defaultdict(list)
        for site, target in sites:
            seen = inputs.get(site.users[0].name)
            alone = len(site.users) == 1 and not site.transposed
            if seen is not None and alone and self._wanted(site, target):
                shared[id(seen)].append(site)
        return [(inputs[group[0].name], tuple(group)) for group in shared.values()]

    def _wanted(self, site: Site, target: Target) -> bool:
        """Whether this weight's input channels would be scaled, if the layer before can take it."""
        smooth = self.recipe.smooth is not None and target.activations != "float"
        return site.kind == "linear" and (self.method.scales_channels or smooth)

    def scale(self, folds: list[Fold]) -> list[Fold]:
        """SmoothQuant or AWQ; the folds that were scaled."""
        scaled = []
        for fold in folds:
            target = self.targets[fold.sites[0].name]
            rule, self.tried = self.recipe.scales, True
            with Autocast.off(fold.sites[0].parameter.device).again():
                if self.method.scales_channels:
                    changed = scale_for_weights(fold, target, rule, self.journal)
                else:
                    assert self.recipe.smooth is not None
                    changed = smooth(fold, target, rule, self.recipe.smooth, self.journal)
            self.done |= changed
            scaled += [fold] if changed else []
        return scaled

    def take_back(self, scaled: list[Fold]) -> None:
        """What was scaled for layers that stay as they were, all of them, gets its values back. A
        layer may be scaled in one fold and be the producer of another: they go together."""
        together: list[dict[int, nn.Parameter]] = []
        for fold in scaled:
            mine = {id(parameter): parameter for parameter in fold.parameters}
            linked = [other for other in together if other.keys() & mine.keys()]
            together = [other for other in together if not other.keys() & mine.keys()]
            for other in linked:
                mine |= other
            together.append(mine)
        for parameters in together:
            if all(parameter.numel() for parameter in parameters.values()):  # none was released
                self.journal.take_back(parameters.values())
                continue
            left = (key for key, parameter in parameters.items() if parameter.numel())
            self.kept += [self._names[key] for key in left if key in self._names]


def smooth(
    fold: Fold, target: Target, rule: str, alpha: float | Literal["auto"], journal: Journal
) -> bool:
    """SmoothQuant: what is hard to round in activations goes into the weights. Whether it does:
    not scaling may be best.

    Xiao et al., 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
    Language Models", arXiv:2211.10438, equation 4: s_j = max|X_j|^α / max|W_j|^(1-α). "auto": the
    α with the least error, for each fold by itself. Channels that calibration never met have the
    median of the others as max|X_j| (`as_known`).
    """
    most_w = _largest(fold)
    alphas = SMOOTH_ALPHAS if alpha == "auto" else (alpha,)

    def candidates() -> Iterator[Tensor]:
        for power in alphas:
            most_x = as_known(fold.inputs.absmax, most_w).clamp(min=1e-5)
            yield most_x.pow(power) / most_w.clamp(min=1e-5).pow(1 - power)

    return _apply_best(fold, target, rule, candidates(), journal, forced=alpha != "auto")


def _largest(fold: Fold) -> Tensor:
    """The largest weight of each input channel, (K,)."""
    return torch.stack([site.weight().abs().amax(0).float() for site in fold.sites]).amax(0)


def scale_for_weights(fold: Fold, target: Target, rule: str, journal: Journal) -> bool:
    """AWQ: what matters in weights is made larger; see `methods/awq.py`. Whether anything is."""
    size = as_known(fold.inputs.mean_size, _largest(fold)).clamp(min=1e-8)
    powers = (size.pow(alpha) for alpha in AWQ_ALPHAS)
    centred = (s / (s.max() * s.min()).sqrt() for s in powers)
    return _apply_best(fold, target, rule, centred, journal, forced=False)


def _apply_best(
    fold: Fold,
    target: Target,
    rule: str,
    candidates: Iterator[Tensor],
    journal: Journal,
    *,
    forced: bool,
) -> bool:
    x_MK = _sample(fold)
    wanted = [x_MK @ w.float().T for site in fold.sites for w in _parts(site)]
    ones = torch.ones_like(x_MK[0])
    best_s = None
    best = torch.inf if forced else _error(fold, target, rule, x_MK, wanted, ones)
    for s_K in candidates:
        s_K = s_K.clamp(1e-4, 1e4)
        error = _error(fold, target, rule, x_MK, wanted, s_K)
        if error < best:
            best_s, best = s_K, error
    if best_s is not None:
        _multiply_in(fold, best_s, journal)
    return best_s is not None


def _sample(fold: Fold) -> Tensor:
    assert fold.inputs.first is not None
    x_MK = fold.inputs.rows(fold.inputs.first)
    step = max(1, len(x_MK) // _SAMPLE)
    return x_MK[::step][:_SAMPLE].float()


def _error(
    fold: Fold, target: Target, rule: str, x_MK: Tensor, wanted: list[Tensor], s_K: Tensor
) -> float:
    """Squared error of the layers' outputs with weights · s and inputs / s rounded."""
    x_MK = x_MK / s_K
    if target.activations != "float":
        whole = target.activations == "tensor"
        step = (fold.inputs.absmax / s_K).max() / 127 if whole else None
        codes, token = quantize_tokens(x_MK, step)
        x_MK = codes.float() * token[:, None]
    if rule == "mse":
        rule = "minmax"  # ranges are narrowed when the scales are found; here it only takes time
    total = 0.0
    parts = [part for site in fold.sites for part in _parts(site)]
    for part, y_MN in zip(parts, wanted, strict=True):
        w_NK = _round_(part.float() * s_K, target.grid, rule)
        total += float((x_MK @ w_NK.T).sub_(y_MN).square_().sum())
    return total


def _parts(site: Site) -> tuple[Tensor, ...]:
    weight = site.weight()
    return weight.split(max(1, _AT_ONCE // weight.shape[1]))


def _round_(w_NK: Tensor, grid: Grid, rule: str) -> Tensor:
    """Every weight becomes the nearest point of its grid, in place."""
    for part in (w_NK,) if grid.group == "tensor" else some_rows(w_NK):
        scale, zero = weight_scale(part, grid, rule)
        part.copy_(nearest_points(part, grid, scale, zero))
    return w_NK


def _multiply_in(fold: Fold, s_K: Tensor, journal: Journal) -> None:
    for parameter in fold.parameters:
        journal.save_values(parameter)
    parameters = producer_parameters(fold.producer)
    if len(parameters) == 1 and parameters[0].dim() == 1:
        # What the norm's own type can hold: then the product is exactly as it was.
        gain = parameters[0].data
        divided = (gain / s_K).to(gain.dtype)
        s_K = torch.where(divided != 0, gain.float() / divided.float(), s_K)
    scale_channels(fold.producer, fold.sites, s_K)
    fold.inputs.divide(s_K)
