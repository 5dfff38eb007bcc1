"""What models are told of tools whose chat templates have no words for them."""

import json
from collections.abc import Sequence

from master.api.answers.ask import ToolUse
from master.text.tokenizer import Message


def description(use: ToolUse) -> str:
    """What a model is told of tools where its template has no words for them."""
    tools = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in use.tools)
    how = "To call one, answer with a JSON object and nothing else"  # the same whether it must: the prefix is cached
    return f'You can call these tools:\n{tools}\n{how}: {{"name": TOOL, "arguments": {{...}}}}'


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation with `text` at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_text(message: Message) -> Message:
    """Calls and results as text, for templates that know none."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"The tool answered: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
    ]
    said = "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)
    return {**message, "content": f"{message['content']}\n{said}".strip()}
