"""What each number of a report means, in a sentence. The page shows these beside the numbers they define."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "acceptance.tokens_per_target_step": (
        "Committed tokens divided by the target's decode forwards, pooled over all rounds of all prompts. The target's own "
        "token of each round is included, the prefill's token is not, and nothing is counted behind the end of a text. "
        "Plain decoding is exactly 1. Written τ; others call it acceptance length or block efficiency."
    ),
    "acceptance.tokens_per_target_step_macro": "The mean over prompts of each prompt's own tokens per target step.",
    "acceptance.accepted_per_round": "The mean number of drafted tokens accepted in a round, without the target's own token.",
    "acceptance.draft_token_yield": (
        "Accepted tokens divided by drafted tokens. It falls as more tokens are drafted a round, so it is no acceptance rate."
    ),
    "acceptance.overlap_alpha": (
        "The acceptance rate α: the sum over the vocabulary of min(p, q), exact from the target's and the draft's "
        "probabilities, averaged over every drafted position up to and including the first rejected one."
    ),
    "acceptance.overlap_alpha_by_position": "The same acceptance rate, averaged at each draft position by itself.",
    "acceptance.top1_agreement": (
        "The share of compared positions at which draft and target give their highest probability to the same token. At "
        "temperature 0 it is what decides acceptance."
    ),
    "acceptance.kl_divergence": (
        "The Kullback-Leibler divergence KL(p ‖ q) of the target's distribution p from the draft's q, in nats, averaged over "
        "compared positions. Over the tokens that the draft can say, with p made to sum to 1 there; the rest is in the "
        "uncovered mass."
    ),
    "acceptance.uncovered_mass": (
        "The target's probability of tokens that the draft cannot say, averaged over compared positions."
    ),
    "acceptance.calibration_error": (
        "How far the draft's probability for its token lies from the target's probability for the same token: the difference "
        "of their means by class of confidence, averaged over all drafts. 0 for a draft equal to the target."
    ),
    "acceptance.reliability": (
        "Drafted tokens in ten classes by the draft's own probability for them: the mean of it, the target's mean probability "
        "for the same tokens, and the share the target kept."
    ),
    "acceptance.stopping_reliability": (
        "Drafts in ten classes by the largest probability of the draft's distribution, which is what the rules that end a "
        "round early read, and the share of them the target kept where it had kept all before them."
    ),
    "acceptance.stopping_calibration_error": (
        "How far that confidence lies from the share kept, by class, averaged over all drafts. A cost rule corrects for it."
    ),
    "acceptance.position_conditional": (
        "Of the rounds in which every draft before this position was accepted, the share in which this one was too. A draft "
        "behind an accepted end of text was never judged and is not counted."
    ),
    "acceptance.position_survival": (
        "Of the rounds that drafted this far, the share that accepted this far. Where every round drafts as many tokens, these "
        "are the shares given all before, multiplied up."
    ),
    "acceptance.accepted_histogram": "How many rounds accepted 0, 1, 2, ... drafted tokens.",
    "acceptance.drafted_histogram": "How many rounds drafted 0, 1, 2, ... tokens.",
    "acceptance.detectable_change_percent": (
        "The smallest change of tokens per target step that so many prompts would show in four of five runs, held against a "
        "fixed number. A comparison prompt by prompt with another draft shows less; it says how little by itself."
    ),
    "speed.decode_speedup": (
        "Plain decoding's seconds per token divided by speculative decoding's: totals over the same prompts, decoded in turns "
        "in one run by the same loop, counting the same kind of token ids. Prefill excluded; below 1 is slower."
    ),
    "speed.decode_speedup_median": "The median over batches of each batch's own decode speedup; less moved by one long answer.",
    "speed.end_to_end_speedup": "As the decode speedup, with the time and the token of the prefill included on both sides.",
    "speed.repeats": "How often each batch was decoded in each mode; modes take turns within a repeat.",
    "speed.phases": (
        "Decode seconds by what they were spent on: the draft's forwards, the target's forwards, acceptance and drawing, and "
        "everything else. Time spent on measuring is in none of them."
    ),
    "speed.predicted": (
        "Decode speedup as a cost model expects it, fitted to a short timing sweep of target and draft on this machine and to "
        "the measured survival by position, at other batch sizes and numbers of drafts. Positions beyond those measured are "
        "given the last one's conditional acceptance; batches beyond the sweep's largest follow the fit. The measured one "
        "stands beside it."
    ),
    "lossless.verdict": (
        "Whether speculative answers equal plain ones token for token. Up to ties: where they part, the target's logits for "
        "the two tokens differ by no more than rounding in its dtype explains. Lossy by design: the rule changes "
        "the distribution. Sampled answers differ anyway: there the rule is proved by enumeration, and two statistical "
        "tests of the samples against the target's distribution must not fail."
    ),
    "quality.perplexity": (
        "exp of the mean negative log-probability that the target itself, at temperature 1 and without top-k or top-p, gives "
        "the tokens of an answer; pooled over all answers. The change is speculative over plain: above 1, the draft made the "
        "answers less likely to the target."
    ),
    "quality.scores": (
        "The mean over all answers of what a scorer gives each; for exact match, the share whose number is the reference's. "
        "The change is speculative minus plain, prompt by prompt. Where no answer is scored otherwise, its interval is that of "
        "a share of which none was seen."
    ),
    "energy": (
        "Joules of the decode seconds divided by the tokens decoded in them, by the counters of the GPU's board (NVML), or of "
        "all of the processor's packages (RAPL): idle power and other work on the machine included, prefill excluded. The "
        "ratio is speculative over plain; below 1 the draft saves energy."
    ),
    "by_category": "The same numbers over the prompts of one category alone.",
    "baselines": (
        "Other ways to decode, measured in the same run on the same prompts. Prompt lookup drafts by copying from the text so "
        "far and needs no training. Suffix lookup does so too, and knows the answers to the suite's earlier prompts of the "
        "same process, never that to the prompt at hand. Self-speculation drafts with the target's own first blocks. A ratio "
        "is this draft's number over theirs, with the same prompts drawn for both."
    ),
    "statistics": (
        "Brackets hold an interval: a percentile bootstrap that draws whole prompts (for seconds, whole batches) with "
        "replacement and divides sums, with both sides of a ratio from the same draw, and tails widened for few prompts."
    ),
    "prompts.failed": (
        "Prompts whose decoding broke off, in any mode. What was decoded of them is counted, a batch that broke off is "
        "timed in no mode, and no gate passes a report that has any."
    ),
}
