"""Where the rows of parameters lie in a segment."""

from __future__ import annotations

import torch

from lezero.comm.feedback import WORKER, Feedback
from lezero.parallel.zero.layout import Layout


def test_every_element_of_a_segment_is_known_by_its_own_name():
    layout = Layout.of([("scale", ()), ("weight", (5, 3)), ("bias", (2,))], 3)
    spans = layout.spans()
    names = [(span.name, at) for span in spans for at in range(span.start, span.stop)]
    places = [at for span in spans for at in range(span.at, span.at + span.stop - span.start)]
    assert len(names) == len(set(names)) == len(set(places)) == 3 + 5 * 3 + 2
    whole = {"scale": torch.tensor(7.0), "weight": torch.rand(5, 3), "bias": torch.rand(2)}
    segment = torch.zeros(layout.numel)
    for place in layout.places:
        for inside, outside in layout.pieces(segment, place, whole[place.name]):
            inside.copy_(outside)
    for (name, at), value in zip(names, segment[places], strict=True):
        assert value == whole[name].flatten()[at if whole[name].dim() else 0]


def test_errors_of_parameters_without_dims_come_back():
    layout, cpu = Layout.of([("scale", ()), ("bias", (4,))], 2), torch.device("cpu")
    kept, again = (Feedback(0, 2, "fp32", cpu) for _ in range(2))
    error = kept.error(WORKER, "k", layout.numel, layout.spans())
    error.copy_(torch.randn(layout.numel))
    again.load_state_dict([kept.state_dict(), {}])
    assert torch.equal(again.error(WORKER, "k", layout.numel, layout.spans()), error)
