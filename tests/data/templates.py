"""Chat templates that behave like those of widely used models, written for these tests."""

from __future__ import annotations

# Qwen3: drops the reasoning of turns before the last question, renders an empty block of reasoning in the last answer,
# and in the generation prompt where enable_thinking is false; tools in the system turn, their results in user turns.
QWEN3 = """{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + 'Tools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content if message.content is string else '' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.question and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<call>' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# R1-distill: the generation prompt opens the reasoning; every finished answer is without it.
R1 = """{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}{% endif %}
{%- if message.role == 'user' %}{{ '<User>' + message.content }}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<Assistant>' + message.content.split('</think>')[-1] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}"""

# Llama 3: a system header in any case, tools and their results under ipython, white space trimmed, an end of its own.
LLAMA3 = """{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{{- '<|start|>system<|h|>\\n\\nToday: ' + date + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|eot|>' }}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant<|h|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
{%- elif message.role in ('tool', 'ipython') %}
{{- '<|start|>ipython<|h|>\\n\\n' + (message.content | tojson) + '<|eot|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|h|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|h|>\\n\\n' }}{% endif %}"""

# Mistral: the system prompt stands in the last question, if that is the last message.
MISTRAL = """{%- if messages[0].role == 'system' %}
{%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
{%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
