"""Chat templates of public model families, in short: what is particular to each, after its documentation.

A family is its template, its special tokens, and how an answer `Four.` is to be learnt after a thought `2 and 2.`
"""

from typing import NamedTuple


class Family(NamedTuple):
    template: str
    special: str  # tokens, by blanks
    answer: str
    thinks: bool | None = None  # the template's variable `enable_thinking`


ASK = "{% if add_generation_prompt %}"
RAISE = "{{ raise_exception('%s') }}"
THINKS = (
    "{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% endif %}"
)


def chatml(before="", assistant="{{ m.content }}", ask=""):
    return (
        before + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + assistant + "{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ASK + "<|im_start|>assistant\n" + ask + "{% endif %}"
    )


LLAMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ strftime_now('%d %b %Y') }}\n\n{{ system }}<|eot_id|>{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}" + RAISE % "single tool-calls only" + "{% endif %}<|start_header_id|>assistant"
    '<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>"
    "ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    "\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}" + ASK + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% endif %}"
)
QWEN_THINKS = (
    THINKS + "{% if loop.last %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n{{ said }}{% else %}{{ said }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
QWEN3 = chatml(assistant=QWEN_THINKS, ask="{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")


def gemma(system):
    return (
        "{{ bos_token }}"
        + system
        + "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        + RAISE % "roles must alternate"
        + "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + ASK + "<start_of_turn>model\n{% endif %}"
    )


def mistral(is_system, end=""):
    """Return a template that writes the system message before the last message alone, or, as newer ones, at its place."""
    told = "{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    in_place = "[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]" if is_system else ""
    before_last = "" if is_system else "{% if loop.last and system %}{{ system }}\n\n{% endif %}"
    return (
        "{{ bos_token }}{% if messages[0].role == 'system' %}" + told + in_place + "{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]" + before_last + "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}"
    )


R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>"
    "{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    + ASK
    + "<|Assistant|><think>\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>{% for m in messages %}"
    "{% if m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% elif 'tool_calls' in m %}"
    "{% set call = m.tool_calls[0] %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json"
    "<|message|>{{ call.function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}"
    + RAISE
    % "channels in content"
    + "{% endif %}{% if loop.last and 'thinking' in m %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}<|start|>functions to=assistant"
    "<|message|>{{ m.content | tojson }}<|end|>{% endif %}{% endfor %}" + ASK + "<|start|>assistant{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    + THINKS
    + "{{ '\n<think>' + (thought.strip() if loop.last else '') + '</think>\n' + said.strip() }}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% endif %}{% endfor %}" + ASK + "<|assistant|>{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    + ASK
    + "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    + ASK
    + ("<|im_start|>assistant<|im_sep|>{% endif %}")
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
FOLDED = (
    "{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
UNKNOWN = "{% set first = '' %}{% if messages[0].role == 'system' %}" + RAISE % "System role not supported" + "{% endif %}"
CHATML, TURN = "<|im_start|> <|im_end|>", "<start_of_turn> <end_of_turn>"
HEADERS = "<|start_header_id|> <|end_header_id|> <|eot_id|>"
THOUGHT = "<think>\n2 and 2.\n</think>\n\nFour.<|im_end|>"

FAMILIES = {
    "llama-3.1": Family(LLAMA, HEADERS, "Four.<|eot_id|>"),
    "llama-3.3": Family(
        LLAMA.replace("Today Date", "Cutting Knowledge Date: December 2023\nToday Date"), HEADERS, "Four.<|eot_id|>"
    ),
    "qwen2.5": Family(chatml(DEFAULT_SYSTEM), CHATML, "Four.<|im_end|>"),
    "qwen3": Family(QWEN3, CHATML, THOUGHT),
    "qwen3-direct": Family(QWEN3, CHATML, "Four.<|im_end|>", thinks=False),
    "gemma-2": Family(gemma(UNKNOWN), TURN, "Four.<end_of_turn>"),
    "gemma-3": Family(gemma(FOLDED), TURN, "Four.<end_of_turn>"),
    "mistral": Family(mistral(False), "[INST] [/INST] </s>", "Four.</s>"),
    "ministral": Family(mistral(True), "[INST] [/INST] </s> [SYSTEM_PROMPT] [/SYSTEM_PROMPT]", "Four.</s>"),
    "phi-4": Family(PHI, CHATML + " <|im_sep|>", "Four.<|im_end|>"),
    "deepseek-r1": Family(R1, "<|User|> <|Assistant|> <|end_of_sentence|>", "2 and 2.\n</think>\n\nFour.<|end_of_sentence|>"),
    "gpt-oss": Family(
        HARMONY,
        "<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>",
        "<|channel|>analysis<|message|>2 and 2.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    ),
    "glm-4.5": Family(GLM, "[gMASK] <sop> <|system|> <|user|> <|assistant|>", "\n<think>2 and 2.</think>\nFour."),
    "granite-3": Family(GRANITE, "<|start_of_role|> <|end_of_role|> <|end_of_text|>", "Four.<|end_of_text|>"),
    "smollm2": Family(chatml(DEFAULT_SYSTEM), CHATML, "Four.<|im_end|>"),
    "smollm3": Family(
        chatml(
            DEFAULT_SYSTEM, THINKS + "{% if loop.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
        ),
        CHATML,
        THOUGHT,
    ),
}
