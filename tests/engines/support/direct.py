"""vLLM by itself, without Headrace: `python -m tests.engines.support.direct` reads prompts from standard input, prints
answers."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    order = json.load(sys.stdin)
    engine = LLM(model=order["model"], enforce_eager=True, block_size=32, **order["args"])
    params = SamplingParams(temperature=0.0, max_tokens=order["max_tokens"], detokenize=False)
    answers = [
        list(engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in order["prompts"]
    ]
    print("answers", json.dumps(answers))  # vLLM prints its log lines to standard output too


if __name__ == "__main__":
    main()
