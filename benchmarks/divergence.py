"""Does the served model say what the engine alone says? Token by token, at temperature 0.

    .venv/bin/python -m benchmarks.divergence --dtype bfloat16
    .venv/bin/python -m benchmarks.divergence --dtype bfloat16 --resume

The same prompts go through a whole deployment (HTTP, NATS, worker) and straight into vLLM in another process.  In float32 the
answers must be equal; in bfloat16 a near tie may fall the other way, so the first difference is reported with the margin
between the two best log-probabilities at that position.  One engine runs at a time.

With --resume the answers are also continued as after a worker's death: a quarter, a half and three quarters of each are given
to a fresh engine as a forced prefix, and what it says next is compared with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import openai

from headrace.workers import bundled_model
from tests.support.up_process import RunningUp

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is two plus two?",
    "Say hello.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
)
ENGINE_START_S = 300.0


def served(model: Path, dtype: str, tokens: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompt ids, answer ids and the margin between the two best log-probabilities at every position."""
    prompts, answers, margins = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", str(model), "--served-name", "m", "--engine-arg", f"dtype={dtype}"]
        flags += ["--engine-arg", "max_model_len=1024"]
        up = RunningUp(Path(folder), *flags, engine="vllm")
        try:
            up.until("ready", lambda: up.state()["ready"], ENGINE_START_S)
            with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", timeout=300) as api:
                for question in QUESTIONS:
                    answer = api.chat.completions.create(
                        model="m",
                        messages=[{"role": "user", "content": question}],
                        max_tokens=tokens,
                        temperature=0,
                        logprobs=True,
                        top_logprobs=2,
                        extra_body={"return_token_ids": True},
                    )
                    extra = answer.choices[0].model_extra or {}
                    prompts.append((answer.model_extra or {})["prompt_token_ids"])
                    answers.append(extra["token_ids"])
                    entries = (answer.choices[0].logprobs and answer.choices[0].logprobs.content) or []
                    margins.append([e.top_logprobs[0].logprob - e.top_logprobs[1].logprob for e in entries])
        finally:
            up.process.terminate()
            up.process.wait(60)
            up.stop()
    return prompts, answers, margins


def direct(model: Path, dtype: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Answer the same prompts in vLLM's offline API, one at a time."""
    args = {"dtype": dtype, "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20}
    order = {"model": str(model), "args": args, "prompts": prompts, "max_tokens": tokens}
    environ = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.support.direct"],
        input=json.dumps(order), capture_output=True, text=True, timeout=600, env=environ, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("answers "))
    answers: list[list[int]] = json.loads(line.removeprefix("answers "))
    return answers


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--resume", action="store_true", help="continue the answers from parts of them, too")
    parser.add_argument("--data-dir", type=Path, default=Path(".headrace"))
    args = parser.parse_args()
    model = bundled_model.prepare((args.data_dir / "models" / bundled_model.NAME).resolve(), progress=print)
    prompts, answers, margins = served(model, args.dtype, args.tokens)
    alone = direct(model, args.dtype, prompts, args.tokens)
    equal = 0
    for question, ours, theirs, margin in zip(QUESTIONS, answers, alone, margins, strict=True):
        if ours == theirs:
            equal += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        print(f"{question!r}: first difference at token {at}, margin {margin[at]:.4f} nats")
    print(f"{args.dtype}: {equal} of {len(QUESTIONS)} answers equal token for token, {args.tokens} tokens at most")
    if args.resume:
        compare_resumed(model, args.dtype, prompts, answers, margins)


def compare_resumed(
    model: Path, dtype: str, prompts: list[list[int]], answers: list[list[int]], margins: list[list[float]]
) -> None:
    """Print where answers that go on after a part of themselves leave their own course, if they do."""
    cuts = [(n, len(answer) * quarter // 4) for n, answer in enumerate(answers) for quarter in (1, 2, 3)]
    forced = [prompts[n] + answers[n][:cut] for n, cut in cuts]
    equal = 0
    for (n, cut), resumed in zip(cuts, direct(model, dtype, forced, max(map(len, answers))), strict=True):
        rest = answers[n][cut:]
        at = next((i for i, (a, b) in enumerate(zip(rest, resumed, strict=False)) if a != b), min(len(rest), len(resumed)))
        if at == len(rest):  # the resumed one was asked for more than is left
            equal += 1
        else:
            where = cut + at
            print(f"{QUESTIONS[n]!r} resumed at {cut}: first difference at token {where}, margin {margins[n][where]:.4f} nats")
    print(f"{dtype}: {equal} of {len(cuts)} resumed answers equal token for token")


if __name__ == "__main__":
    main()
