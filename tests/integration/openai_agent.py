"""Programs with an OpenAI client of their own that play episodes: as a function, and as a script."""

import json
import os
import sys
import time

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


def play(base_url, api_key, row):
    """Three turns with a streamed one, a call of a tool and its result, and a history that is rewritten at the end."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        messages = list(row["messages"])
        first = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="policy", messages=messages, max_tokens=8, stream=True)
        )
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=8).choices[0]
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "seen"})
        if not answer.message.tool_calls:
            messages.append({"role": "user", "content": "go on"})
        client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=8)
        short = [{"role": "user", "content": "in short?"}]
        said = client.chat.completions.create(model="policy", messages=short, max_completion_tokens=8)
        return float("a" in said.choices[0].message.content)


def hangs(base_url, api_key, row):
    """Makes one request and never ends."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        client.chat.completions.create(model="policy", messages=row["messages"], max_tokens=8)
    if row["episode_key"][2] % 2:
        while True:
            time.sleep(0.01)
    return 1.0


if __name__ == "__main__":
    print("playing")
    print(play(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], json.load(sys.stdin)))
