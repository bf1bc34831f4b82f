"""Answers by OpenVINO, in its own environment: `python serve_openvino.py job.json answers.json`, as `serve_engines.py` runs it.

Imports nothing of the project, which that environment does not have.
"""

import json
import sys
from importlib import metadata
from pathlib import Path

import numpy
import openvino as ov
import openvino_genai as genai


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    properties = {"INFERENCE_PRECISION_HINT": job["precision"], "KV_CACHE_PRECISION": job["precision"]}
    properties["INFERENCE_NUM_THREADS"] = job["threads"]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    draft = genai.draft_model(job["draft"], "CPU", **properties)
    pipeline = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, draft_model=draft, **properties)
    answers = []
    for tokens, length in job["prompts"]:
        config = genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        # With room beyond the answer's end no round is cut short for want of it.
        config.max_new_tokens = length + 2 * (job["num_speculative_tokens"] + 1)
        config.num_assistant_tokens = job["num_speculative_tokens"]
        output = pipeline.generate(ov.Tensor(numpy.array([tokens], dtype=numpy.int64)), config)
        _, *brought = output.extended_perf_metrics.raw_metrics.m_batch_sizes  # the first step is the prompt's
        answers.append([output.tokens[0], [each - 1 for each in brought]])
    found = {"version": metadata.version("openvino-genai"), "answers": answers}
    Path(answers_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
