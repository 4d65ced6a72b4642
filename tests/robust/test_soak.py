"""20,000 steps of decoding: nothing grows but the latents, no logit leaves the numbers, and a fresh prefill says the same."""

from pathlib import Path

import torch

from tests.helpers import tokens, toy

STEPS, EVERY, MARGIN = 20_000, 2_500, 4 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_twenty_thousand_steps():
    """Two KDA layers and one MLA, in float64. Memory that decoding takes for good: at most three times the latents, for the buffer has
    room and the old one is there while a new one is filled, and 4 MB. The prefill between is not counted."""
    model = toy(num_hidden_layers=3, kda_layers=(1, 2), full_attn_layers=(3,), hidden_size=16, vocab_size=32, num_heads=2, head_dim=8,
                num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=16, num_experts=0,
                intermediate_size=16, attn_res_block_size=None, max_position_embeddings=32_768)
    ids, cache, fresh = tokens(1, STEPS, vocab=32), model.new_cache(), model.new_cache()
    per_token, grown = (8 + 4) * 8, 0
    with torch.inference_mode():
        model(ids[:, :1], cache=model.new_cache())      # what torch sets up at the first call
        for end in range(EVERY, STEPS + 1, EVERY):
            before = resident()
            for t in range(end - EVERY, end):
                logits = model(ids[:, t:t + 1], cache=cache)
            grown += resident() - before
            for piece in ids[:, end - EVERY:end].split(250, 1):
                again = model(piece, cache=fresh)[:, -1:]
            assert logits.isfinite().all()
            torch.testing.assert_close(logits, again, atol=1e-9, rtol=1e-9)
            fixed = sum(x.nbytes for state in cache.states[:2] for x in state.tensors())
            assert cache.nbytes() == fixed + end * per_token and fixed < 5_000
            assert grown < 3 * end * per_token + MARGIN
