"""`/api/embed` and the older `/api/embeddings`."""

from __future__ import annotations

from tests.support.frontend.pooling import EMBEDDER, MODEL, Bench


async def test_texts_become_vectors_in_their_order() -> None:
    bench = Bench(job_inputs=2)
    answer = (await bench.post("/api/embed", {"model": EMBEDDER, "input": ["a", "bb", "ccc"]})).json()
    assert answer["embeddings"] == [[3.0, 1.0], [4.0, 1.0], [5.0, 1.0]]
    assert (answer["model"], answer["prompt_eval_count"], answer["load_duration"]) == (EMBEDDER, 12, 0)
    assert answer["total_duration"] > 0
    one = (await bench.post("/api/embed", {"model": f"{EMBEDDER}:latest", "input": "a"})).json()
    assert (one["embeddings"], one["model"]) == ([[3.0, 1.0]], f"{EMBEDDER}:latest")


async def test_what_is_too_long_is_cut_unless_that_is_forbidden() -> None:
    bench = Bench()
    answer = (await bench.post("/api/embed", {"model": EMBEDDER, "input": "x" * 99})).json()
    assert answer["embeddings"] == [[32.0, 1.0]]
    call = await bench.post("/api/embed", {"model": EMBEDDER, "input": "x" * 99, "truncate": False})
    assert (call.status, list(call.json())) == (400, ["error"])


async def test_the_older_form_has_one_vector_and_no_counts() -> None:
    call = await Bench().post("/api/embeddings", {"model": EMBEDDER, "prompt": "bb"})
    assert call.json() == {"embedding": [4.0, 1.0]}


async def test_a_model_for_something_else_says_so() -> None:
    call = await Bench().post("/api/embeddings", {"model": MODEL, "prompt": "bb"})
    assert (call.status, "does not serve embedding" in call.json()["error"]) == (400, True)
