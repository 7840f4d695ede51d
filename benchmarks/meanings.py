"""What the columns of a decode report say, for its readers: written into the file and onto the page."""

MEANINGS = {
    "arm": "plain, speculative (fixed k), governed (the governor chooses up to k); hf_plain and hf_assisted are "
    "transformers' generate, stock, with the same weights; hf_assisted takes one request at a time",
    "k": "draft length; plain and hf_plain have none and were measured once: their rows repeat for each k",
    "batch": "requests in flight: of ours a closed loop of so many clients, of transformers one padded batch after "
    "the other",
    "proposed": "tokens proposed, of all repeats",
    "accepted": "of these, accepted",
    "rounds": "rounds of a request that proposed something, of all repeats",
    "plain_rounds": "rounds of a request without a proposal, of all repeats",
    "acceptance_rate": "accepted / proposed",
    "acceptance_length": "1 + accepted / rounds",
    "acceptance_by_position": "survival: share of rounds that accepted at least 1, 2, ... k tokens; "
    "its sum is acceptance_length - 1",
    "acceptance_probability": "mean of sum(min(p, q)) over the positions of plain's outputs (greedy: share of "
    "positions where the drafter's choice is the target's)",
    "rejection_positions": "rounds that refused their 1st, 2nd, ... kth token",
    "draft_ms": "proposing, median of the rounds",
    "verify_ms": "the target's pass and the decision, median of the rounds",
    "round_ms": "a whole round of the batch with all that belongs to it, median",
    "latency_ms": "a request from sending to its last token, median",
    "latency_p95_ms": "the same, 95th percentile",
    "tokens_per_second": "output tokens of all requests over the time of all, prefill included; median of the repeats",
    "accepted_progress": "output tokens that rounds committed, over all requests, per ms of whole rounds (prefill and "
    "first tokens left out); median of the repeats",
    "peak_memory_mb": "resident peak of the process, which holds all arms; the largest of the repeats",
    "identical": "greedy outputs equal to plain's of the same prompt, batch and run",
    "near_ties": "greedy outputs that part from plain's where the target's two logits are nearer than rounding",
    "different": "greedy outputs that part elsewhere: defects",
    "speed_up": "accepted_progress / that of plain in the same run",
    "throughput_ratio": "tokens_per_second / that of plain in the same run",
    "ideal_speed_up": "acceptance_length x round_ms of plain / (draft_ms + verify_ms)",
    "ratio_to_ideal": "speed_up / ideal_speed_up",
    "ratio_to_best": "governed: accepted_progress / the most of plain and of speculative at any measured k up to this",
    "verdict": "on: faster than plain in every repeat; off: in none; unclear: in some",
}
