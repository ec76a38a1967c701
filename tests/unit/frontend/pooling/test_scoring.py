"""`/v1/score` and `/v1/rerank`, with a model that reads pairs and with one that only embeds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.broker.codec import unpack_u32
from headrace.broker.messages import PoolingInput
from tests.support.frontend.pooling import CLS, EMBEDDER, MODEL, SCORER, SEP, Bench

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


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_top_n_and_return_documents(path: str) -> None:
    body = (await Bench(by_length).post(path, rank(top_n=2, return_documents=False))).json()
    assert body["results"] == [{"index": 1, "relevance_score": 4.0}, {"index": 3, "relevance_score": 3.0}]


async def test_ties_stay_in_the_order_of_the_request() -> None:
    body = (await Bench(lambda given: [0.5]).post("/rerank", rank())).json()
    assert [result["index"] for result in body["results"]] == [0, 1, 2, 3]


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


async def test_an_embedding_model_scores_pairs_side_by_side() -> None:
    bench = await embedder()
    body = (await bench.post("/v1/score", {"model": EMBEDDER, "text_1": ["a", "b"], "text_2": ["b", "b"]})).json()
    assert [entry["score"] for entry in body["data"]] == pytest.approx([0.0, 1.0])


async def test_an_embedding_model_ranks() -> None:
    bench = await embedder()
    body = (await bench.post("/rerank", {"model": EMBEDDER, "query": "b", "documents": ["a", "b", {"text": "c"}]})).json()
    assert [result["document"]["text"] for result in body["results"]] == ["b", "c", "a"]


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
async def test_a_wrong_request_is_a_400_that_names_the_parameter(path: str, body: Any, param: str) -> None:
    bench = Bench(by_length, max_inputs=5)
    call = await bench.post(path, body)
    assert (call.status, call.error["param"]) == (400, param)
    assert not bench.jobs


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"])
async def test_a_model_that_neither_scores_nor_embeds_is_a_400(path: str) -> None:
    texts = {"text_1": "a", "text_2": "b"} if path.endswith("score") else {"query": "q", "documents": ["d"]}
    call = await Bench().post(path, {"model": MODEL, **texts})
    assert (call.status, call.error["code"]) == (400, "wrong_kind")
    assert "chat, completion" in call.error["message"]
