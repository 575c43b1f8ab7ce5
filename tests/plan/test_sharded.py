"""The forecast of sharded models: what each stage keeps, what a wire keeps, what is exchanged."""

import pytest
import torch

from lezero.comm.choice import Exchange
from lezero.comm.probe import Level
from lezero.comm.wire import Wire
from lezero.models import Transformer, TransformerConfig
from lezero.parallel.zero import Zero
from lezero.plan import StepSpec, communication, kinds, sharded
from lezero.plan.capacity import suggest
from lezero.plan.forecast import memory_of
from lezero.plan.trace import Trace, trace_step

LAYERS, DIM = 3, 512


def build() -> Transformer:
    return Transformer(TransformerConfig(vocab=512, dim=DIM, layers=LAYERS, heads=4, context=64))


def spec(stage: int, **changes) -> StepSpec:
    compute = changes.pop("compute", "fp32")
    zero = Zero(stage=stage, compute=compute)
    return StepSpec(batch=1, tokens=16, ranks=2, zero=zero, pool=False, **changes)


def state(trace: Trace) -> dict[str, float]:
    """Bytes a parameter of what lasts."""
    sizes = dict.fromkeys(trace.kinds, 0)
    events = trace.events[: trace.bounds[-1]]
    gone = {block for block, size in events if size < 0}
    for block, size in events:
        if block not in gone:
            sizes[trace.kinds[block]] += size
    return {kind: size / trace.parameters for kind, size in sizes.items()}


def test_each_stage_keeps_what_it_says() -> None:
    found = [state(trace_step(build, spec(stage))) for stage in range(4)]
    near = {"rel": 0.02}
    for kind, bytes_each in ((kinds.OPTIMIZER, (8, 4, 4, 4)), (kinds.GRADIENT, (4, 2, 2, 2))):
        expected = [pytest.approx(count, **near) for count in bytes_each]
        assert [one[kind] for one in found] == expected
    kept = [one[kinds.PARAMETER] + one.get(kinds.WHOLE, 0) for one in found]
    assert kept[:3] == [pytest.approx(4, **near)] * 3
    buffers = [one.get(kinds.WIRE, 0) for one in found]
    assert buffers[0] == 0, "stage 0 sums in the gradients themselves"
    assert buffers[1] == pytest.approx(4, **near), "stage 1 keeps whole gradients"
    assert buffers[2] < 4, "stages 2 and 3 lend buffers"


def test_stage_3_keeps_two_blocks_and_the_root_whole() -> None:
    trace = trace_step(build, spec(3))
    block = sum(p.numel() for p in build().layers[0].parameters())
    root = sum(p.numel() for p in build().parameters()) - LAYERS * block
    whole = state(trace)[kinds.WHOLE] * trace.parameters
    assert whole == pytest.approx(4 * (2 * block + root), rel=0.02)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_16_bits_add_up(stage: int) -> None:
    def low() -> Transformer:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return build()
        finally:
            torch.set_default_dtype(torch.float32)

    once, twice = (trace_step(low, spec(stage, accumulate=count)) for count in (1, 2))
    assert twice.parameters == once.parameters
    assert len(twice.calls) >= len(once.calls)


def test_masters_stay_whole_numbers_of_bytes_in_bf16() -> None:
    found = state(trace_step(build, spec(2, compute="bf16")))
    assert found[kinds.PARAMETER] == pytest.approx(2, rel=0.02)
    assert found[kinds.WHOLE] == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("kept", "dtype", "bytes_each"),
    [("worker", "fp32", 4), ("worker", "bf16", 2), ("both", "fp32", 6), ("worker", "int8", 1)],
)
def test_feedback_keeps_a_value_a_parameter(kept: str, dtype: str, bytes_each: float) -> None:
    wire = Wire(codec="int4", feedback=kept, feedback_dtype=dtype)
    stage = 0 if kept == "both" else 2
    trace = trace_step(build, spec(stage, wire=wire))
    found = state(trace)[kinds.FEEDBACK]
    if dtype == "int8":  # and one buffer to decode into, as large as the largest
        bytes_each += 4 * max(p.numel() for p in build().parameters()) / trace.parameters
    assert found == pytest.approx(bytes_each, rel=0.02)
    assert not trace.mapped, "encoded gradients go through sockets"
    _, parts = memory_of(trace, spec(stage, wire=wire).with_(saves=True), {})
    whole = trace.state_bytes
    errors = parts["checkpoint"] - whole[kinds.PARAMETER] - whole[kinds.OPTIMIZER]
    saved = 8 if dtype == "int8" else bytes_each  # decoded to fp32 before they are copied
    assert errors / trace.parameters == pytest.approx(saved, rel=0.02)


def test_a_save_joins_errors_of_small_parameters_before_it_copies_them() -> None:
    def small() -> torch.nn.Module:
        return Transformer(TransformerConfig(vocab=512, dim=64, layers=1, heads=4, context=64))

    trace = trace_step(small, spec(2, wire=Wire(codec="int4", feedback="worker")))
    assert trace.state_bytes[kinds.FEEDBACK] == pytest.approx(8 * trace.parameters, rel=0.02)


def test_traffic_is_that_of_the_stage() -> None:
    def moved(trace: Trace, operation: str) -> float:
        numels = (e.numel * n for e, n in trace.traffic.items() if e.operation == operation)
        return sum(numels) / trace.parameters

    two, often = (trace_step(build, spec(2, accumulate=n)) for n in (1, 4))
    assert moved(two, "reduce_scatter") == pytest.approx(1, rel=0.02)
    assert moved(two, "all_gather") == pytest.approx(1, rel=0.02)
    assert moved(often, "reduce_scatter") == pytest.approx(4, rel=0.02)
    assert moved(trace_step(build, spec(1, accumulate=4)), "reduce_scatter") < 1.02
    three = trace_step(build, spec(3))
    assert 1 < moved(three, "all_gather") < 2.02
    assert moved(trace_step(build, spec(0)), "all_reduce") == pytest.approx(1, rel=0.02)


def test_time_of_an_exchange_is_by_the_probe() -> None:
    trace = Trace()
    trace.traffic[Exchange("reduce_scatter", 2_000_000, 4)] = 10
    flat = Wire(topology="flat")
    memory = Level("memory", 1e-4, 1e10)
    slow, fast = (
        communication.seconds(
            trace, spec(2, wire=flat, levels=(memory, Level("loopback", 1e-3, rate)))
        )["communication"]
        for rate in (1e8, 1e9)
    )
    # Two small exchanges tell which parameters were used and the norm; sums read two parts.
    assert slow == pytest.approx(2e-3 + 10 * (1e-3 + 4e6 / 1e8 + 1.5 * 4e6 / 1e10))
    assert fast == pytest.approx(2e-3 + 10 * (1e-3 + 4e6 / 1e9 + 1.5 * 4e6 / 1e10))
    coded = communication.seconds(trace, spec(2, wire=Wire(codec="int8", feedback="worker")))
    assert coded["codec"] > 0


@pytest.mark.parametrize(("stage", "exchanges"), [(0, 2), (1, 2), (2, 5), (3, 5)])
def test_small_exchanges_go_with_each_backward_that_reduces_and_with_the_norm(
    stage: int, exchanges: int
) -> None:
    step = spec(
        stage, wire=Wire(topology="flat"), levels=(Level("loopback", 1e-3, 1e9),), accumulate=4
    )
    found = communication.seconds(Trace(), step)["communication"]
    assert found == pytest.approx(exchanges * 1e-3)
    unclipped = communication.seconds(Trace(), step.with_(clip=False))["communication"]
    assert unclipped == pytest.approx((exchanges - 1) * 1e-3)


def test_a_codec_of_gathers_is_of_no_account_where_nothing_is_gathered() -> None:
    wire = Wire(gather="int8")
    assert [sharded.topology(spec(stage, wire=wire)) for stage in (0, 1)] == ["shared", "flat"]


def test_encoding_of_gathered_parameters_takes_time() -> None:
    trace = Trace()
    trace.traffic[Exchange("all_gather", 2_000_000, 4)] = 10
    assert "codec" not in communication.seconds(trace, spec(2, wire=Wire(topology="flat")))
    assert communication.seconds(trace, spec(2, wire=Wire(gather="int8")))["codec"] > 0


def test_a_shard_that_is_not_in_its_place_is_copied_there() -> None:
    def copies(stage: int, compute: str) -> int:
        trace = trace_step(build, spec(stage, compute=compute))
        return sum(
            count
            for phase, counts in trace.counts.items()
            if phase != "update"
            for key, count in counts.items()
            if key.startswith("aten.copy_")
        )

    assert copies(3, "fp32") > copies(2, "fp32")


def test_a_higher_stage_is_suggested_when_it_would_fit() -> None:
    one, three = (memory_of(trace_step(build, s), s, {})[0] for s in (spec(1), spec(3)))
    found = suggest(build, spec(1), (one + three) // 2)
    assert any(line.startswith("zero.stage=") for line in found)


def test_the_random_generator_and_the_model_stay() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    trace_step(build, spec(3))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_of_torch_is_not_tried_out() -> None:
    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert kinds.OPTIMIZER not in state(trace_step(build, spec(3, optimizer=sgd)))
