import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lezero.models import Sampling
from lezero.models.sampling import choose
from lezero.ops.draw import native
from lezero.serve import Drawn, SamplingParams, sampler
from lezero.serve.likeliest import best_tokens, likeliest
from lezero.serve.sampler import Row, draw

MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.7, logprobs=3),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.8, logprobs=20),
    SamplingParams(top_k=300, top_p=0.95),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, logprobs=1),
    SamplingParams(temperature=2.0, top_p=0.999),
]


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What draws: the kernels of a CPU, or what accelerators run."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "native", lambda scores_RV: False)
    elif not native(torch.zeros(1, 1)):
        pytest.skip("no native kernel of draw")
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits(rows: int, vocabulary: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Random, rounded to bf16, so that equal logits are many."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).bfloat16().float()


def tokens(drawn: list[Drawn]) -> list[int]:
    return [one.token for one in drawn]


@pytest.mark.parametrize("vocabulary", [7, 300, 9000])
@pytest.mark.parametrize(
    "shared",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.0, "top_k": 6000},
        {"temperature": 1.0, "top_k": 100_000, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.7, "top_p": 0.999},
        {"temperature": 1.2, "top_k": 500, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 1.0},
    ],
)
def test_tokens_are_those_of_plain_generation(vocabulary: int, shared: dict[str, float]) -> None:
    for seed, spread in ((1, 0.2), (2, 3.0)):
        rows_RV = logits(24, vocabulary, spread, seed)
        positions = list(range(5, 29))
        wanted = choose(rows_RV, Sampling(seed=seed, **shared), positions, range(24))
        params = SamplingParams(**shared)
        rows = [Row(params, seed, position, n) for n, position in enumerate(positions)]
        assert tokens(draw(rows_RV, rows)) == wanted.tolist()


def rows_of(params: list[SamplingParams], vocabulary: int) -> list[Row]:
    history = [(7 * n) % vocabulary for n in range(30)]
    return [Row(each, 3, 30 + n, n, history, 20) for n, each in enumerate(params)]


@pytest.mark.parametrize("vocabulary", [50, 5000, 40_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_is_the_row_in_a_batch(vocabulary: int, threads: int) -> None:
    torch.set_num_threads(threads)
    params = MIXED * 2
    rows_RV, rows = logits(len(params), vocabulary), rows_of(params, vocabulary)
    together = draw(rows_RV, rows)
    alone = [draw(rows_RV[n : n + 1].clone(), [row])[0] for n, row in enumerate(rows)]
    assert together == alone
    backwards = draw(rows_RV.flip(0), rows[::-1])
    assert backwards[::-1] == together


def test_a_row_of_nan_harms_no_other() -> None:
    rows_RV, rows = logits(len(MIXED), 400), rows_of(MIXED, 400)
    good = draw(rows_RV, rows)
    for bad in (torch.nan, torch.inf):
        for number in range(len(MIXED)):
            poisoned_RV = rows_RV.clone()
            poisoned_RV[number, 13] = bad
            found = draw(poisoned_RV, rows)
            assert found[number].token == -1
            assert f"position {30 + number} hold NaN" in str(found[number].error)
            assert found[number].logprob is None
            del found[number]
            assert found == good[:number] + good[number + 1 :]
    nothing = draw(torch.full((1, 5), -torch.inf), [Row(SamplingParams(), 0, 0)])
    assert nothing[0].error
    assert draw(torch.empty(0, 5), []) == []


def test_refused_tokens_are_never_drawn() -> None:
    rows_RV = torch.full((200, 10), -torch.inf)
    rows_RV[:, [2, 5]] = torch.tensor([1.0, 0.0])
    rows = [Row(SamplingParams(temperature=5.0), 0, n) for n in range(200)]
    assert set(tokens(draw(rows_RV, rows))) == {2, 5}


def shares(params: SamplingParams, rows_V: torch.Tensor, history: list[int]) -> torch.Tensor:
    """How often each token is drawn."""
    tries = 3000
    rows = [Row(params, 0, n, 0, history, 2) for n in range(tries)]
    found = torch.tensor(tokens(draw(rows_V.expand(tries, -1), rows)))
    return found.bincount(minlength=len(rows_V)).double() / tries


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_min_p_is_that_of_transformers(temperature: float) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rows_V = torch.tensor([1.0, 0.2, -0.5, 0.7, -2.0, 0.3])
    scores = rows_V[None] / temperature
    scores = warpers.TopPLogitsWarper(0.9)(None, scores)
    wanted = warpers.MinPLogitsWarper(0.4)(None, scores).softmax(-1)[0]
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.4)
    found = shares(params, rows_V, [])
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted.double(), atol=0.04, rtol=0)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    rows_RV, history = logits(1, 50), [3, 3, 9, 20, 21, 22, 40]
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.8)
    wanted = penalty(torch.tensor([history]), rows_RV.clone())[0]
    # The token that wins once all better ones are taken away tells every logit's rank.
    order, left = [], rows_RV.clone()
    params = SamplingParams(temperature=0.0, repetition_penalty=1.8)
    for _ in range(50):
        (drawn,) = draw(left, [Row(params, 0, 0, 0, history, 2)])
        order.append(drawn.token)
        left[0, drawn.token] = -1e30
    assert order == wanted.sort(descending=True, stable=True).indices.tolist()


def test_presence_and_frequency_count_the_answer_only() -> None:
    history = [0, 0, 1, 1, 1, 2]  # the prompt is the first two
    rows_V = torch.tensor([1.0, 2.0, 1.5, 0.0])
    params = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5)
    wanted = torch.tensor([1.0, 2.0 - 0.25 - 1.5, 1.5 - 0.25 - 0.5, 0.0]).softmax(-1)
    torch.testing.assert_close(shares(params, rows_V, history), wanted.double(), atol=0.04, rtol=0)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_act_alone_too(name: str) -> None:
    row = Row(SamplingParams(temperature=0.0, **{name: 0.5}), 0, 3, 0, [1, 0], 1)
    assert tokens(draw(torch.tensor([[1.0, 0.9, 0.0]]), [row])) == [1]


def test_log_probabilities_are_the_models_own(way: str) -> None:
    rows_RV = logits(3, 60)
    wanted = rows_RV.log_softmax(-1)
    if way == "kernels":
        wanted = rows_RV.double().log_softmax(-1).float()
    history = [1, 2, 3]
    asked = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=3.0, top_k=9, logprobs=4),
        SamplingParams(temperature=0.0, repetition_penalty=2.0, logprobs=20),
    ]
    for number, drawn in enumerate(draw(rows_RV, [Row(p, 0, 3, 0, history, 1) for p in asked])):
        assert drawn.logprob is not None
        assert drawn.logprob.logprob == wanted[number, drawn.token].item()
        order = wanted[number].sort(descending=True, stable=True)
        count = asked[number].logprobs or 0
        best = zip(order.indices.tolist()[:count], order.values.tolist()[:count], strict=True)
        assert drawn.logprob.likeliest == tuple(best)
        assert math.fsum(math.exp(value) for _, value in drawn.logprob.likeliest) <= 1.0001


def test_logits_in_half_precision_give_the_same() -> None:
    rows_RV, rows = logits(len(MIXED), 500), rows_of(MIXED, 500)
    assert draw(rows_RV.bfloat16(), rows) == draw(rows_RV, rows)


def test_more_log_probabilities_than_tokens_are_all() -> None:
    (drawn,) = draw(torch.zeros(1, 3), [Row(SamplingParams(logprobs=20), 0, 0)])
    assert drawn.logprob is not None
    assert [token for token, _ in drawn.logprob.likeliest] == [0, 1, 2]


def test_penalties_that_leave_no_number_are_named() -> None:
    params = SamplingParams(repetition_penalty=0.01)
    row = Row(params, 1, 3, history=[1, 2, 3], prompt=3)
    (drawn,) = draw(torch.full((1, 8), 3e37), [row])
    assert "after the penalties that were asked for" in str(drawn.error)
    assert drawn.sound
    (worse,) = draw(torch.full((1, 8), torch.nan), [row])
    assert worse.error
    assert not worse.sound
    (plain,) = draw(torch.full((1, 8), torch.nan), [Row(SamplingParams(), 1, 3)])
    assert "penalties" not in str(plain.error)
    assert not plain.sound


@pytest.mark.parametrize("vocabulary", [1, 17, 48, 3000, 3072, 4096])
def test_the_likeliest_token_is_the_first_of_equals(vocabulary: int) -> None:
    rows_RV = logits(9, vocabulary)
    rows_RV[1], rows_RV[2, vocabulary // 2], rows_RV[3] = 0.0, torch.nan, -torch.inf
    rows_RV[4, -1] = torch.inf
    highest, token = likeliest(rows_RV)
    wanted = rows_RV.max(-1)
    torch.testing.assert_close(highest, wanted.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(token, wanted.indices)
    assert best_tokens(rows_RV) == wanted.indices.where(wanted.values.isfinite(), -1).tolist()


@pytest.mark.parametrize("way", ["torch"], indirect=True)
@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_p", [None, 1.0])
def test_the_device_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    logprobs: int | None,
    top_p: float | None,
) -> None:
    asked = []

    def counted(name: str) -> None:
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *given: asked.append(name) or real(x, *given)
        )

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "nonzero"):
        counted(name)
    params = SamplingParams(temperature=temperature, logprobs=logprobs, top_p=top_p)
    rows_RV = logits(8, 3000, spread=9.0)
    found = draw(rows_RV, [Row(params, 1, number) for number in range(8)])
    assert asked == ["tolist"]
    assert all((one.logprob is None) == (logprobs is None) for one in found)


class Sends(TorchFunctionMode):
    """Notes what torch itself sends to a device, and waits for it: lists, and tensors made there
    of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function is torch.tensor and torch.device(kwargs["device"]).type != "cpu"
        indexes = getattr(function, "__name__", "") in ("__getitem__", "__setitem__")
        if made or (indexes and isinstance(args[1], list)):
            self.noted.append((function, args))
        return function(*args, **kwargs)


@pytest.mark.parametrize("way", ["torch"], indirect=True)
def test_nothing_is_sent_that_waits_for_the_device() -> None:
    plain, some = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=5)
    every = SamplingParams(temperature=0.7, logprobs=2, repetition_penalty=1.5)
    rows = [
        Row(params, 1, number, history=(1, 2, 2), prompt=1)
        for number, params in enumerate((plain, some, every))
    ]
    with Sends() as sends, pytest.raises(NotImplementedError, match="no data"):
        draw(torch.zeros(3, 3000, device="meta"), rows)  # ends where the device is asked
    assert not sends.noted
