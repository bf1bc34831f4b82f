"""Builders for tests of target caches: conversations of random tokens, a cache job run to its end, and damage."""

import numpy as np
import torch

from configs.runtime.files import sha256_of
from configs.schema.data import CacheConfig
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset, collate
from distill.dataset.conversations import Conversation


def conversation(prompt_ids, answer_ids, prompt_id="p", earlier=()):
    """Return a conversation of these tokens, whose messages have no texts; without `earlier` answers it has none."""
    turn = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    return Conversation(
        prompt_id=prompt_id,
        category="c",
        turn=0,
        messages=tuple(turn * (len(earlier) + 1 if earlier else 0)),
        earlier=earlier,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        ended=False,
    )


def random_conversations(lengths, vocab_size, seed):
    """Return conversations of random tokens; `lengths` are pairs of prompt and answer tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, answer) in enumerate(lengths):
        ids = torch.randint(vocab_size, (prompt + answer,), generator=generator).tolist()
        rows.append(conversation(ids[:prompt], ids[prompt:], f"p{number}"))
    return rows


def write_rows(path, conversations):
    """Write a conversations file, and return its path."""
    path.write_text("".join(row.to_line() for row in conversations))
    return path


def batch_of(conversations, numbers, max_length=512):
    """Return the batch of some conversations."""
    dataset = ConversationDataset(conversations, max_length)
    return collate([dataset[number] for number in numbers])


def cache_job(target, data_file, conversations, output, **settings):
    """Return the job of making a cache in the folder `output`."""
    config = CacheConfig(data=str(data_file), output=str(output), **settings)
    return CacheJob(target=target, conversations=conversations, config=config, data_sha256=sha256_of(data_file))


def run(job):
    """Make a cache in one process; return its manifest."""
    job.prepare()
    job.work(rank=0, num_processes=1)
    return job.finish()


def shard_files(folder):
    """Return the bytes of a cache's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.json"}


def flip_a_bit(path):
    """Damage a file."""
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def efficiency(batches, lengths):
    """Return the tokens among all positions of batches, whose rows are conversations or several of them."""
    sizes = [[int(lengths[np.atleast_1d(row)].sum()) for row in batch] for batch in batches]
    return sum(map(sum, sizes)) / sum(len(batch) * max(batch) for batch in sizes)
