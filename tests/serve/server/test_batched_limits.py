"""What encoders and modules bear over HTTP: poison, too much at once, and the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save

from lezero.core.errors import ConfigError
from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan
from lezero.serve.server.batched import BatchServer
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.inference import TENSORS
from tests.serve.batching.test_runner import Doubling
from tests.serve.server.batch_running import Net, serving_batches
from tests.serve.server.running import head, read_all, until


class Slow(Net):
    """Waits for its gate."""

    gate = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.gate.wait(20)
        return super().forward(x)


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    made.gate.set()
    yield made
    made.gate.set()


@torch.no_grad()
def test_a_poisoned_request_harms_no_other(slow: Slow) -> None:
    rows = [[1.0, 2, 3, 4], [666.0, 0, 0, 0], [777.0, 0, 0, 0], [4.0, 3, 2, 1]]
    with serving_batches(InferModule(slow, torch.zeros(1, 4)), Plan(64)) as client:
        slow.gate.clear()
        found: dict[int, Any] = {}

        def ask(i: int) -> None:
            found[i] = client.ask("/v1/infer", {"inputs": rows[i % 4]})

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        until(lambda: client.server.batches.runner.active == 9)
        slow.gate.set()
        for thread in threads:
            thread.join()
    assert len(found) == 9
    for i, answer in found.items():
        if i % 4 in (1, 2):
            assert answer.status == 500
            assert answer.error["code"] == "model_error"
        else:
            told = torch.tensor([answer.json["outputs"]["output"]])
            wanted = Net()(torch.tensor([rows[i % 4]]))
            torch.testing.assert_close(told, wanted, rtol=1e-4, atol=1e-5)


class _Leaving(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == 5).any()):
            raise SystemExit(3)
        return super().forward(x)


def test_a_module_that_ends_the_program_harms_no_other(caplog) -> None:
    with serving_batches(InferModule(_Leaving(), torch.zeros(1, 4))) as client:
        assert client.ask("/v1/infer", {"inputs": [5, 0, 0, 0]}).status == 500
        assert client.ask("/v1/infer", {"inputs": [4, 0, 0, 0]}).status == 200


def test_a_loop_that_fails_is_not_healthy(monkeypatch, caplog) -> None:
    with serving_batches(InferModule(Net(), torch.zeros(1, 4)), Plan(4)) as client:

        def fails(*given: Any, **options: Any) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(client.server.batches.batcher, "done", fails)
        asked = {"inputs": [[4, 0, 0, 0]] * 6}
        assert client.ask("/v1/infer", asked).status == 500
        assert client.ask("/health").status == 503
        assert client.ask("/v1/infer", asked).status == 503


def test_more_than_may_wait_are_told_to_come_again(slow: Slow) -> None:
    with serving_batches(InferModule(slow, torch.zeros(1, 4)), Plan(1), queue=2) as client:
        slow.gate.clear()
        asked = {"inputs": [0, 0, 0, 0]}
        open_ones = [client.begin(asked, "/v1/infer")]
        runner = client.server.batches.runner
        until(lambda: runner.active == 1 and runner.batcher.waiting == 0)
        open_ones += [client.begin(asked, "/v1/infer") for _ in range(2)]
        until(lambda: runner.active == 3)
        refused = client.ask("/v1/infer", asked)
        assert refused.status == 429
        assert refused.error["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        open_ones.pop().close()
        until(lambda: runner.active == 2)
        slow.gate.set()
        for connection in open_ones:
            with connection:
                assert b" 200 " in connection.recv(4096)


class _Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_rows_of_a_request_are_bounded(shape: tuple[int, ...]) -> None:
    with serving_batches(InferModule(_Sum(), torch.zeros(shape))) as client:
        rows = torch.zeros(2049, *shape[1:])
        for body in (
            {"data": {"inputs": rows.tolist()}},
            {"data": save({"input": rows}), "content_type": TENSORS},
        ):
            refused = client.ask("/v1/infer", **body)
            assert refused.status == 400
            assert "got 2049 rows, allowed are 1 to 2048" in refused.error["message"]
            assert refused.error["param"] == "inputs"
        found = client.ask("/v1/infer", {"inputs": rows[1:].tolist()})
        assert len(found.json["outputs"]["output"]) == 2048


def test_where_none_may_wait_one_is_answered(slow: Slow) -> None:
    with serving_batches(InferModule(slow, torch.zeros(1, 4)), queue=0) as client:
        asked = {"inputs": [0, 0, 0, 0]}
        assert client.ask("/v1/infer", asked).status == 200
        slow.gate.clear()
        with client.begin(asked, "/v1/infer") as first:
            until(lambda: client.server.batches.runner.active == 1)
            assert client.ask("/v1/infer", asked).status == 429
            slow.gate.set()
            assert b" 200 " in first.recv(4096)
        assert client.ask("/v1/infer", asked).status == 200


def test_too_slow_an_answer_is_504(slow: Slow) -> None:
    with serving_batches(InferModule(slow, torch.zeros(1, 4)), request_s=0.1) as client:
        slow.gate.clear()
        assert client.ask("/v1/infer", {"inputs": [0, 0, 0, 0]}).status == 504
        slow.gate.set()


def test_the_end_waits_for_what_runs(slow: Slow) -> None:
    with serving_batches(InferModule(slow, torch.zeros(1, 4))) as client:
        slow.gate.clear()
        connection = client.connect()
        body = json.dumps({"inputs": [0, 0, 0, 0]}).encode()
        connection.sendall(head("/v1/infer", len(body), "connection: close") + body)
        until(lambda: client.server.batches.runner.active == 1)
        client.server.stop()
        until(lambda: client.server.app.draining)
        assert client.ask("/ready").status == 503
        assert client.ask("/v1/infer", {"inputs": [0, 0, 0, 0]}).status == 503
        slow.gate.set()
        with connection:
            assert b" 200 " in read_all(connection)


def test_what_does_not_end_is_told_so(slow: Slow) -> None:
    with serving_batches(InferModule(slow, torch.zeros(1, 4)), drain_s=0.05) as client:
        slow.gate.clear()
        connection = client.begin({"inputs": [0, 0, 0, 0]}, "/v1/infer")
        until(lambda: client.server.batches.runner.active == 1)
        client.server.stop()
        with connection:
            told = connection.recv(4096)
            slow.gate.set()
            assert b" 503 " in told
            assert b"shutting down" in told + read_all(connection)


def test_a_model_that_http_has_no_questions_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="got a Doubling, allowed are SentenceEncoder and"):
        BatchServer(Doubling(), ServeConfig(port=0))  # type: ignore[arg-type]
