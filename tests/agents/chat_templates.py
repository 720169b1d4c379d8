"""Chat templates that end turns as those of widely used model families do, written for these tests.

`FAMILIES`: for each the template, its special tokens, those that end a turn, and what is expected of a conversation
that goes on with a user's message and with a tool's answer: "whole" if the ledger is the template's own rendering of
the whole conversation, "end" if the template changes earlier turns in it, "" if such a conversation is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A chat template, and what is expected of it."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    user: str
    tool: str


def turns(head: str, tail: str, call: str, prompt: str, roles: str = "message.role", before: str = "") -> str:
    """Return a template of turns that look alike: the head of each, with `roles`, its text and calls, and its tail."""
    return (
        before + "{% for message in messages %}{{ '" + head + "' | replace('ROLE', " + roles + ") }}"
        "{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}{{ '" + tail + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    )


JSON_CALL = "{{ '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</call>' }}"
TOOLS_FIRST = "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
CHATML = turns("<|im_start|>ROLE\\n", "<|im_end|>\\n", JSON_CALL, "<|im_start|>assistant\\n", before=TOOLS_FIRST)

# Qwen3: reasoning of turns before the last question is dropped; answers of tools in a row share a user's turn.
QWEN3 = (
    TOOLS_FIRST
    + """{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.question and m.reasoning_content is defined %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + OPENED }}{% endif %}"""
)
# Llama 3: text is trimmed, one call in a turn, answers of tools as JSON under a role of their own.
LLAMA3 = """{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday<|eot_id|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# Mistral: no roles; tools stand before the last question; ids of calls have nine letters.
MISTRAL = """{{- '<s>' }}{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.last and tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{%- set ns = namespace(calls=[]) %}
{%- for call in m.tool_calls %}
{%- set ns.calls = ns.calls + [{'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id}] %}
{%- endfor %}
{{- '[TOOL_CALLS]' + (ns.calls | tojson) + '</s>' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
# R1: the generation prompt opens the reasoning, which finished turns lose; results of tools in a block.
R1 = """{{- '<|begin|>' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<|Assistant|>' + (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<|call|>' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|eos|>' }}{% endif %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|results|>' }}{% endif %}{{ '<|result|>' + m.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|results end|>' }}{% endif %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
# GLM: a turn ends with the marker of whoever speaks next.
GLM = """{{- '[gMASK]' }}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + value + '</arg_value>' }}{% endfor %}
{{- '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
# Harmony: calls end with <|call|>, and the end of a final answer is another token in history than the sampled one.
HARMONY = """{%- set ns = namespace(tool='') %}{%- for m in messages %}
{%- if m.tool_calls %}{%- set ns.tool = m.tool_calls[0].function.name %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- '<|start|>assistant to=functions.' + ns.tool + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) }}
{{- '<|end|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GEMMA_ROLE = "'model' if message.role == 'assistant' else 'user'"
IM, PHI = ("<|im_start|>", "<|im_end|>"), ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
INSTRUCT = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
R1_TOKENS = ("<|begin|>", "<|User|>", "<|Assistant|>", "<|eos|>", "<|call|>", "<|results|>", "<|result|>")
GLM_TOKENS = ("[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
COMMAND = ("<|START|>", "<|USER|>", "<|CHATBOT|>", "<|TOOL|>", "<|END|>")

FAMILIES = {
    "chatml": Family(CHATML, IM, ("<|im_end|>",), "whole", "whole"),
    "chatml two stops": Family(CHATML, (*IM, "<|endoftext|>"), ("<|endoftext|>", "<|im_end|>"), "whole", "whole"),
    "qwen3": Family(QWEN3.replace("OPENED", "''"), IM, ("<|im_end|>",), "end", "whole"),
    "qwen3 thinking": Family(QWEN3.replace("OPENED", "'<think>\\n'"), IM, ("<|im_end|>",), "end", "whole"),
    "llama3": Family(LLAMA3, HEADERS, ("<|eot_id|>", "<|eom_id|>"), "whole", "whole"),
    "mistral": Family(MISTRAL, (*INSTRUCT, *RESULTS), ("</s>",), "whole", "whole"),
    "r1": Family(R1, R1_TOKENS, ("<|eos|>",), "whole", "whole"),
    "glm": Family(GLM, GLM_TOKENS, ("<|user|>", "<|observation|>"), "whole", "whole"),
    "harmony": Family(HARMONY, HARMONY_TOKENS, ("<|return|>", "<|call|>"), "", "whole"),
    "gemma": Family(
        turns("<turn>ROLE\\n", "<end_of_turn>\\n", "", "<turn>model\\n", roles=f"({GEMMA_ROLE})"),
        ("<turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        "whole",
        "",
    ),
    "phi": Family(turns("<|ROLE|>", "<|end|>", JSON_CALL, "<|assistant|>"), PHI, ("<|end|>",), "whole", "whole"),
    "phi newlines": Family(
        turns("<|ROLE|>\\n", "<|end|>\\n", JSON_CALL, "<|assistant|>\\n"), PHI, ("<|end|>",), "whole", "whole"
    ),
    "command": Family(
        turns(
            "<|START|><|ROLE|>",
            "<|END|>",
            JSON_CALL,
            "<|START|><|CHATBOT|>",
            roles="{'user': 'USER', 'assistant': 'CHATBOT', 'tool': 'TOOL', 'system': 'SYSTEM'}[message.role]",
        ),
        COMMAND,
        ("<|END|>",),
        "whole",
        "whole",
    ),
    "granite": Family(
        turns("<|role|>ROLE<|role end|>", "<|end|>\\n", JSON_CALL, "<|role|>assistant<|role end|>"),
        ("<|role|>", "<|role end|>", "<|end|>"),
        ("<|end|>",),
        "whole",
        "whole",
    ),
    "plain text": Family(
        turns("ROLE: ", "</s>\\n\\n", JSON_CALL, "assistant: "), ("</s>",), ("</s>",), "whole", "whole"
    ),
    "no end": Family(turns("\\nROLE: ", "", JSON_CALL, "\\nassistant: "), ("</s>",), ("</s>",), "", ""),
}
