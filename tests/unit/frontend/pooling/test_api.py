"""`POST /v1/embeddings` and the routes beside it, over a scripted broker."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from headrace.broker.errors import JobFailed
from headrace.broker.messages.requests import PoolingInput
from tests.support.frontend.fakes import Call, chat
from tests.support.frontend.pooling import BERT, CLASSIFIER, CLS, EMBEDDER, MODEL, SCORER, SEP, Bench

URL = "/v1/embeddings"


def ask(given: Any, **more: Any) -> dict[str, Any]:
    return {"model": EMBEDDER, "input": given, **more}


def alphabet(text: str) -> list[int]:
    return list(Tokenizer.from_str(BERT["tokenizer.json"].decode()).encode(text).ids)


async def test_the_answer_has_openais_shape_and_counts_special_tokens() -> None:
    call = await Bench().post(URL, ask("abc"))
    body = call.json()
    assert call.status == 200
    assert body.pop("id").startswith("embd-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "list",
        "model": EMBEDDER,
        "data": [{"index": 0, "object": "embedding", "embedding": [5.0, 1.0]}],
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [alphabet("ab")]),
        (["ab", "c"], [alphabet("ab"), alphabet("c")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_all_four_forms_of_input_reach_the_worker(given: Any, expected: list[list[int]]) -> None:
    bench = Bench()
    assert (await bench.post(URL, ask(given))).status == 200
    assert bench.ids() == expected
    assert expected[0][0] != CLS or expected[0][-1] == SEP


async def test_a_job_is_bounded_in_tokens_but_for_a_single_input() -> None:
    bench = Bench(job_input_tokens=10)
    await bench.post(URL, ask(["x" * 4, "x" * 2, "x" * 20, "x"]))
    assert [job.prompt_tokens for job in bench.jobs] == [10, 22, 3]


async def test_what_the_router_counts_is_of_kind_pool_and_makes_no_output() -> None:
    bench = Bench()
    await bench.post(URL, ask(["ab", "c"], priority=4, service_tier="priority"), headers={"x-headrace-tenant": "t1"})
    (job,) = bench.jobs
    envelope = job.envelope(judge="i", now=0.0, payload=job.payload(), spill=None)
    assert (envelope.kind, envelope.tokens, envelope.choices, envelope.max_tokens) == ("pool", 7, 2, 1)
    assert (envelope.tenant, envelope.priority, envelope.request_class, envelope.hashes) == ("t1", 4, "hi", b"")


@pytest.mark.parametrize("wish", [{"dimensions": 3}, {"use_activation": False}, {"normalize": False}])
async def test_wishes_about_the_vector_reach_the_worker(wish: dict[str, Any]) -> None:
    bench = Bench()
    await bench.post(URL, ask("a", **wish))
    pooling = bench.jobs[0].pooling
    assert pooling is not None
    assert (pooling.dimensions, pooling.normalize) == (wish.get("dimensions"), None if "dimensions" in wish else False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (ask([]), "input"),
        (ask(["a", 1]), "input"),
        (ask(["a", ""], add_special_tokens=False), "input[1]"),
        (ask([[1], [999]]), "input[1]"),
        (ask("a", encoding_format="hex"), "encoding_format"),
        (ask("a", dimensions=0), "dimensions"),
        (ask("a", embed_dtype="float16"), "embed_dtype"),
        (ask("a", endianness="big"), "endianness"),
        (ask("a", messages=[]), "messages"),
        (ask("a", truncate_prompt_tokens=33), "truncate_prompt_tokens"),
        (ask("a", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (ask("abc", truncate_prompt_tokens=2), "truncate_prompt_tokens"),
        (ask("a", use_activation=True, normalize=False), "normalize"),
        (ask(["a"] * 5), "input"),
        ({"model": EMBEDDER}, "input"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_parameter(body: Any, param: str) -> None:
    bench = Bench(max_inputs=4)
    call = await bench.post(URL, body)
    assert (call.status, call.error["param"]) == (400, param)
    assert not bench.jobs


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        ({"truncate_prompt_tokens": -1}, "0123456789ABCDEFGHIJKLMNOPQRST"),
        ({"truncate_prompt_tokens": 6}, "0123"),
        ({"truncate_prompt_tokens": 6, "truncation_side": "left"}, "WXYZ"),
    ],
)
async def test_a_cut_text_keeps_its_special_tokens(wish: dict[str, Any], kept: str) -> None:
    bench = Bench()
    await bench.post(URL, ask("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", **wish))
    assert bench.ids() == [alphabet(kept)]


async def test_ids_are_cut_as_they_are() -> None:
    bench = Bench()
    await bench.post(URL, ask(list(range(40)), truncate_prompt_tokens=3))
    await bench.post(URL, ask(list(range(40)), truncate_prompt_tokens=3, truncation_side="left"))
    assert (bench.ids(0), bench.ids(1)) == ([[0, 1, 2]], [[37, 38, 39]])


@pytest.mark.parametrize(
    ("path", "model", "kind"),
    [
        (URL, MODEL, "embedding"),
        (URL, SCORER, "embedding"),
        ("/v1/classify", EMBEDDER, "classify"),
        ("/classify", MODEL, "classify"),
        ("/pooling", MODEL, "embedding"),
    ],
)
async def test_a_model_of_another_kind_is_a_400_that_names_what_it_serves(path: str, model: str, kind: str) -> None:
    bench = Bench()
    call = await bench.post(path, {"model": model, "input": "a"})
    served = ", ".join(bench.ingress.models.served[model].card.kinds)
    assert (call.status, call.error["code"]) == (400, "wrong_kind")
    assert kind in call.error["message"]
    assert served in call.error["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", {"prompt": "a"})])
async def test_text_is_not_generated_by_a_model_that_embeds(path: str, body: dict[str, Any]) -> None:
    call = await Bench().post(path, {**body, "model": EMBEDDER})
    assert (call.status, call.error["code"]) == (400, "wrong_kind")
    assert "embedding" in call.error["message"]


@pytest.mark.parametrize("vector", [b"", b"abc", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f"])
async def test_a_vector_without_meaning_is_a_502_and_never_a_null(vector: bytes) -> None:
    bench = Bench()
    script = bench.ingress.script

    def broken(job: Any) -> Any:
        for step in script(job):
            yield [msgspec.structs.replace(r, fin=msgspec.structs.replace(r.fin, vector=vector)) for r in step]

    bench.ingress.script = broken
    call = await bench.post(URL, ask("a"))
    assert (call.status, call.error["code"]) == (502, "engine_error")


async def test_one_job_that_fails_fails_the_request_and_stops_the_others() -> None:
    bench = Bench(job_inputs=1)
    script = bench.ingress.script
    bench.ingress.script = lambda job: [JobFailed("broken")] if len(bench.jobs) == 2 else list(script(job))[:0]
    call = await bench.post(URL, ask(["a", "b", "c"]))
    assert call.status == 502
    assert [answer.cancelled for answer in bench.ingress.answers] == [True] * 3


async def test_a_client_that_leaves_stops_its_jobs() -> None:
    bench = Bench(job_inputs=1)
    bench.ingress.script = lambda job: []
    call = Call(bench.frontend.app, URL, ask(["a", "b"]))
    running = asyncio.create_task(call.run())
    await call.until(lambda: len(bench.ingress.answers) == 2)
    call.leave()
    await running
    assert all(answer.cancelled for answer in bench.ingress.answers)


async def test_a_large_answer_is_put_together_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.frontend.pooling import writers

    where: list[int] = []
    real = writers.EmbeddingWriter.make

    def make(self: writers.EmbeddingWriter) -> bytes:
        where.append(threading.get_ident())
        return real(self)

    monkeypatch.setattr(writers.EmbeddingWriter, "make", make)
    bench = Bench(lambda given: [1.0] * 100, inline_prompt_bytes=150)
    await bench.post(URL, ask("a"))
    body = (await bench.post(URL, ask(["a", "b"]))).json()
    assert [len(entry["embedding"]) for entry in body["data"]] == [100, 100]
    assert [there == threading.get_ident() for there in where] == [True, False]


# -- the routes beside it --------------------------------------------------------------------------------------


async def test_pooling_gives_what_the_model_makes() -> None:
    bench = Bench()
    for model, task in ((EMBEDDER, "embed"), (CLASSIFIER, "classify"), (SCORER, "classify")):
        body = (await bench.post("/pooling", {"model": model, "input": "abc"})).json()
        assert body["data"] == [{"index": 0, "object": "pooling", "data": [5.0, 1.0]}]
        pooling = bench.jobs[-1].pooling
        assert pooling is not None
        assert pooling.task == task


@pytest.mark.parametrize(("task", "param"), [("token_embed", "task"), ("plugin", "task")])
async def test_pooling_refuses_tasks_that_give_more_than_one_vector(task: str, param: str) -> None:
    call = await Bench().post("/pooling", {"model": EMBEDDER, "input": "a", "task": task})
    assert (call.status, call.error["param"], call.error["code"]) == (400, param, "unsupported_parameter")


LETTERS = {"a": [1.0, 0.0], "b": [0.0, 2.0], "c": [1.0, 1.0]}


def by_length(given: PoolingInput) -> list[float]:
    """The score of a pair: the length of its second text."""
    assert given.second is not None
    return [len(given.token_ids) // 4 - given.second - 1.0]


def rank(**more: Any) -> dict[str, Any]:
    return {"model": SCORER, "query": "q", "documents": ["bb", "dddd", "a", "ccc"], **more}


async def embedder() -> Bench:
    """An embedding model that knows three letters."""
    bench = Bench()
    ids: dict[tuple[int, ...], list[float]] = {}
    for letter, vector in LETTERS.items():
        await bench.post("/v1/embeddings", {"model": EMBEDDER, "input": letter})
        ids[tuple(bench.ids(len(bench.jobs) - 1)[0])] = vector
    return Bench(lambda given: ids[tuple(unpack_u32(given.token_ids))])


async def test_a_ranking_is_best_first_with_the_documents() -> None:
    bench = Bench(by_length)
    call = await bench.post("/v1/rerank", rank())
    body = call.json()
    assert call.status == 200
    assert body["id"].startswith("rerank-")
    assert body["model"] == SCORER
    assert body["usage"] == {"prompt_tokens": 26, "total_tokens": 26}
    assert body["results"] == [
        {"index": i, "document": {"text": text, "multi_modal": None}, "relevance_score": float(len(text))}
        for i, text in ((1, "dddd"), (3, "ccc"), (0, "bb"), (2, "a"))
    ]


async def test_a_pair_is_put_together_as_the_tokenizer_does_it_with_the_place_of_the_second_text() -> None:
    bench = Bench(by_length)
    await bench.post("/v1/score", {"model": SCORER, "text_1": "ab", "text_2": "c"})
    (ids,) = bench.ids()
    assert (ids[0], ids[3], ids[5], len(ids)) == (CLS, SEP, SEP, 6)
    pooling = bench.jobs[0].pooling
    assert pooling is not None
    assert (pooling.task, pooling.inputs[0].second) == ("classify", 4)


@pytest.mark.parametrize(
    ("names", "one", "two", "lengths"),
    [
        (("text_1", "text_2"), "q", ["a", "bb"], [1.0, 2.0]),
        (("queries", "documents"), ["q", "r"], ["a", "bb"], [1.0, 2.0]),
        (("queries", "items"), ["q"], "a", [1.0]),
        (("data_1", "data_2"), "q", {"text": "bbb"}, [3.0]),
    ],
)
async def test_the_two_sides_go_by_all_their_names(names: tuple[str, str], one: Any, two: Any, lengths: list[float]) -> None:
    call = await Bench(by_length).post("/score", {"model": SCORER, names[0]: one, names[1]: two})
    body = call.json()
    assert body["object"] == "list"
    assert body["data"] == [{"index": i, "object": "score", "score": score} for i, score in enumerate(lengths)]


async def test_an_embedding_model_scores_by_the_cosine_and_embeds_one_query_once() -> None:
    bench = await embedder()
    body = (await bench.post("/v1/score", {"model": EMBEDDER, "text_1": "a", "text_2": ["a", "b", "c"]})).json()
    assert [entry["score"] for entry in body["data"]] == pytest.approx([1.0, 0.0, 1 / math.sqrt(2)])
    assert len(bench.ids()) == 4
    assert body["usage"]["prompt_tokens"] == 12


@pytest.mark.parametrize(
    ("wish", "lengths"),
    [
        ({"max_tokens_per_doc": 2}, (4, 2)),
        ({"max_tokens_per_query": 3}, (3, 4)),
        ({"truncate_prompt_tokens": 9}, (3, 3)),
        ({"truncate_prompt_tokens": 7, "max_tokens_per_query": 1}, (1, 3)),
        ({"truncate_prompt_tokens": 8, "max_tokens_per_query": 1}, (1, 4)),
    ],
)
async def test_pairs_are_cut_at_the_longer_text_and_keep_their_separators(
    wish: dict[str, Any], lengths: tuple[int, int]
) -> None:
    bench = Bench(by_length)
    await bench.post("/rerank", {"model": SCORER, "query": "abcd", "documents": ["efgh"], **wish})
    (ids,) = bench.ids()
    first = ids.index(SEP) - 1
    assert (first, len(ids) - first - 3) == lengths
    assert ids[-1] == SEP


async def test_texts_of_an_embedding_model_are_cut_as_well() -> None:
    bench = Bench()
    await bench.post("/rerank", {"model": EMBEDDER, "query": "abcd", "documents": ["efgh"], "max_tokens_per_doc": 2})
    assert [len(ids) for ids in bench.ids()] == [6, 4]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"model": SCORER}, "text_1"),
        ("/score", {"model": SCORER, "text_1": "a"}, "text_1"),
        ("/score", {"model": SCORER, "text_1": "a", "items": "b"}, "items"),
        ("/score", {"model": SCORER, "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"model": SCORER, "text_1": "a", "text_2": {"image_url": "x"}}, "text_2"),
        ("/rerank", {"model": SCORER, "documents": ["a"]}, "query"),
        ("/rerank", rank(documents=[]), "documents"),
        ("/rerank", rank(documents=["a"] * 6), "documents"),
        ("/rerank", rank(documents=["a", {"content": []}]), "documents[1]"),
        ("/rerank", rank(top_n=-1), "top_n"),
        ("/rerank", rank(instruction="do"), "instruction"),
        ("/rerank", rank(max_tokens_per_doc=32), "max_tokens_per_doc"),
        ("/rerank", rank(documents=["a", "x" * 40]), "documents[1]"),
        ("/rerank", rank(truncate_prompt_tokens=3), "truncate_prompt_tokens"),
    ],
)
async def test_scoring_a_wrong_request_is_a_400_that_names_the_parameter(path: str, body: Any, param: str) -> None:
    bench = Bench(by_length, max_inputs=5)
    call = await bench.post(path, body)
    assert (call.status, call.error["param"]) == (400, param)
    assert not bench.jobs
