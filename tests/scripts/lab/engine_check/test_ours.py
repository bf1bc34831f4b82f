"""Our side of the serving check: rounds and accepted drafts, counted as engines count them."""

import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.heads import MtpSettings
from eval.decoder.decode import decode
from heads.artifact import load_draft
from heads.vocabulary import DraftVocabulary
from scripts.lab.engine_check.ours import Counts, count_ours
from tests.scripts.lab.engine_check.conftest import K
from tests.support import family_checks as checks
from tests.support.artifacts import save_artifact


def test_whole_rounds_are_what_drafts_and_plain_text_say(bench, tiny_run):
    """An oracle that knows the endless text counts how many drafts are right at every place."""
    target, counts = bench.endless, count_ours(bench, tiny_run / "artifact", K, cut=False)
    proposer = load_draft(tiny_run / "artifact", target.identity, target.model).proposer
    for request, length, counted in zip(bench.requests, bench.lengths, counts, strict=True):
        text = decode(target, [request], DecodeConfig(num_speculative_tokens=0, max_new_tokens=length + K))[0][0].tokens
        place, accepted = 1, []
        while place < length:
            drafts = greedy(proposer.model, [*request.tokens, *text[:place]], K)
            right = next((n for n, pair in enumerate(zip(drafts, text[place:], strict=False)) if pair[0] != pair[1]), K)
            accepted.append(right)
            place += right + 1
        assert counted == Counts(len(accepted), sum(accepted))


@torch.no_grad()
def greedy(model, ids, number):
    """Return the tokens by which a model continues a text."""
    for _ in range(number):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-number:]


def test_cut_rounds_bring_no_more_than_the_answer(bench, tiny_run):
    whole, cut = (count_ours(bench, tiny_run / "artifact", K, cut=cut) for cut in (False, True))
    for length, one, other in zip(bench.lengths, whole, cut, strict=True):
        # A last round without drafts brings one token, and does not count.
        assert length - 1 - (other.rounds + other.accepted) in (0, 1)
        assert one.rounds + one.accepted >= length - 1
        assert one.rounds - other.rounds in (0, 1)
        assert other.accepted <= one.accepted


def test_the_targets_whole_output_head_takes_the_place_of_a_draft_vocabulary(bench, tmp_path):
    target, tokens = bench.endless, sorted({token for answer in bench.plain for token in answer.tokens})
    others = DraftVocabulary(token_ids_W=torch.tensor([n for n in range(64) if n not in tokens]), target_vocab_size=64)
    for name, vocabulary in (("whole", None), ("reduced", others)):
        head = checks.build(MtpSettings(kind="mtp", num_depths=1, shared_depths=True), target.model, vocabulary, stir=0.5)
        save_artifact(tmp_path / name, head, target.identity.to_dict(), vocabulary)
    whole, reduced = (count_ours(bench, tmp_path / name, K, cut=False) for name in ("whole", "reduced"))
    assert sum(each.accepted for each in whole) > 0 == sum(each.accepted for each in reduced)
    assert count_ours(bench, tmp_path / "reduced", K, cut=False, whole_head=True) == whole
