"""More slots than the context has positions: two sizes that must never be taken for each other."""

from __future__ import annotations

import asyncio
from typing import Any

from renma.inference import Sample, SamplingParams
from renma.inference.local import LocalEngine
from tests.inference.tiny_models import ids, make


def test_more_slots_than_context(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=40, context=24)
    few = LocalEngine(make("llama"), tokenizer, slots=4, context=24)

    async def all_of(chosen: LocalEngine) -> list[Sample]:
        prompt = ids("guess\n")
        asked = [chosen.sample(prompt, SamplingParams(max_tokens=6, seed=n), key=(n,)) for n in range(40)]
        return await asyncio.gather(*asked)

    assert [s.ids.tolist() for s in asyncio.run(all_of(engine))] == [s.ids.tolist() for s in asyncio.run(all_of(few))]
